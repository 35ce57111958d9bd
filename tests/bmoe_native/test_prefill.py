"""Prefill, cancel, state: what must be the same is the same bit for bit."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe_native import ArgumentError, BusyError, Engine, PrefillResult, StateError, TooLongError, UnsupportedError
from bmoe_native._lib import ffi, lib
from tests import tiny

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 250)]


def fresh(path: Path, pieces: list[list[int]], **options: int) -> np.ndarray:
    with Engine.open(path, n_ctx=256, n_ubatch=32, **options) as engine:
        for piece in pieces:
            engine.prefill(piece)
        return engine.logits()


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_same_pieces_same_bits(arch: str, n_threads: int, tiny_path: Path, moe_path: Path) -> None:
    path = tiny_path if arch == "llama" else moe_path
    once = fresh(path, [TOKENS], n_threads=n_threads)
    np.testing.assert_array_equal(once, fresh(path, [TOKENS], n_threads=n_threads))
    # 250 tokens at a ubatch of 32 are the pieces 32 x 7 and 26, whoever cuts them.
    cut = [TOKENS[at : at + 32] for at in range(0, 250, 32)]
    np.testing.assert_array_equal(once, fresh(path, cut, n_threads=n_threads))


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_a_restored_state_computes_what_the_saved_one_did(arch: str, tiny_path: Path, moe_path: Path) -> None:
    path = tiny_path if arch == "llama" else moe_path
    with Engine.open(path, n_ctx=256, n_ubatch=32) as engine:
        for n_kept in (1, 31, 200):
            engine.drop_state()
            engine.prefill(TOKENS[:n_kept])
            state = engine.save_state()
            assert len(state) == engine.state_size()
            engine.prefill(TOKENS[n_kept : n_kept + 40])
            wanted = engine.logits()
            engine.drop_state()
            engine.prefill([5] * 200)
            engine.load_state(state)
            assert engine.position == n_kept
            with pytest.raises(StateError, match="no logits"):
                engine.logits()
            engine.prefill(TOKENS[n_kept : n_kept + 40])
            np.testing.assert_array_equal(engine.logits(), wanted)
            np.testing.assert_array_equal(wanted, fresh(path, [TOKENS[:n_kept], TOKENS[n_kept : n_kept + 40]]))


def test_a_state_that_grows_after_it_was_measured_is_saved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that another thread prefills."""
    engine.prefill(TOKENS[:100])
    whole = engine.save_state()
    monkeypatch.setattr(Engine, "state_size", lambda _engine: 64)
    assert engine.save_state() == whole


def test_keep_cuts_and_drop_empties(engine: Engine, tiny_path: Path) -> None:
    engine.prefill(TOKENS[:100])
    engine.keep_state(64)
    assert engine.position == 64
    with pytest.raises(StateError, match="no logits"):
        engine.logits()
    engine.prefill([1, 2, 3])
    np.testing.assert_array_equal(engine.logits(), fresh(tiny_path, [TOKENS[:64], [1, 2, 3]]))
    with pytest.raises(ArgumentError, match="68"):
        engine.keep_state(68)
    with pytest.raises(ArgumentError):
        engine.keep_state(-1)
    engine.drop_state()
    engine.prefill([1, 2, 3])
    np.testing.assert_array_equal(engine.logits(), fresh(tiny_path, [[1, 2, 3]]))


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "qwen3next", "lfm2moe"])
def test_numbers_that_are_none_do_not_outlive_their_state(tmp_path: Path, arch: str, kv_type: str) -> None:
    path = tiny.write(tmp_path / "nan.gguf", arch=arch)
    reader = gguf.GGUFReader(path, "r+")
    [embeddings] = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    embeddings.data[7] = np.nan
    reader.data.flush()
    with Engine.open(path, n_ctx=64, n_ubatch=16, kv_type=kv_type) as engine:
        engine.prefill([1, 2])
        good = engine.save_state()
        engine.prefill([3])
        expected = engine.logits()
        assert np.isfinite(expected).all()
        engine.drop_state()
        engine.prefill([7] * 20)
        assert np.isnan(engine.logits()).all()
        bad = engine.save_state()
        engine.load_state(good)
        engine.prefill([3])
        np.testing.assert_array_equal(engine.logits(), expected)
        engine.load_state(bad)
        engine.drop_state()
        engine.prefill([1, 2])
        engine.prefill([3])
        np.testing.assert_array_equal(engine.logits(), expected)


def test_the_context_holds_exactly_n_ctx(engine: Engine) -> None:
    engine.prefill(TOKENS + [1] * 5)
    engine.prefill([2])
    assert engine.position == 256
    logits = engine.logits()
    with pytest.raises(TooLongError, match=r"1 tokens.*256.*256"):
        engine.prefill([3])
    np.testing.assert_array_equal(engine.logits(), logits)
    engine.drop_state()
    with pytest.raises(TooLongError, match=r"257.*256"):
        engine.prefill([1] * 257)
    assert engine.position == 0 and engine.counters().n_prefill_tokens == 256


@pytest.mark.parametrize("n_ubatch", [1, 32, 512])
@pytest.mark.parametrize("n_tokens", [300, 513, 3000])
def test_prompts_wider_than_a_batch(tiny_path: Path, n_ubatch: int, n_tokens: int) -> None:
    with Engine.open(tiny_path, n_ctx=4096, n_ubatch=n_ubatch) as engine:
        result = engine.prefill([9] * n_tokens)
        assert (result.n_tokens, engine.position, result.cancelled) == (n_tokens, n_tokens, False)
        assert engine.counters().n_graphs == -(-n_tokens // n_ubatch)
        assert np.isfinite(engine.logits()).all()


def test_nothing_to_prefill_is_named(engine: Engine) -> None:
    with pytest.raises(ArgumentError, match="no tokens"):
        engine.prefill([])
    with pytest.raises(ArgumentError, match="vocabulary"):
        engine.prefill([2**40])


def cancel_when_running(engine: Engine, tokens: list[int], after_s: float) -> PrefillResult:
    """Prefill in a thread and cancel it after a while, when it is seen to run."""
    outcome = []
    worker = threading.Thread(target=lambda: outcome.append(engine.prefill(tokens)))
    worker.start()
    time.sleep(after_s)
    with pytest.raises(BusyError):
        _ = engine.position
    engine.cancel()
    worker.join(timeout=60)
    assert not worker.is_alive()
    return outcome[0]


def test_cancel_stops_between_pieces(tiny_path: Path) -> None:
    with Engine.open(tiny_path, n_ctx=4096, n_ubatch=64, n_threads=1) as engine:
        whole = engine.prefill([7] * 4000)
        engine.drop_state()
        result = cancel_when_running(engine, [7] * 4000, whole.prefill_s / 6)
    assert result.cancelled
    assert 0 < result.n_tokens < 4000


def test_cancel_stops_a_graph_that_is_running(tiny_path: Path) -> None:
    """The prompt is one piece here, so there is no time between two of them."""
    with Engine.open(tiny_path, n_ctx=4096, n_ubatch=4096, n_threads=1) as engine:
        whole = engine.prefill([7] * 4096)
        assert engine.counters().n_graphs == 1
        engine.drop_state()
        result = cancel_when_running(engine, [7] * 4096, whole.prefill_s / 6)
        assert engine.counters().n_graphs == 1
    assert result.cancelled and result.n_tokens == 0
    assert whole.prefill_s / 20 < result.prefill_s < whole.prefill_s * 3 / 4


def test_cancel_leaves_the_state_as_it_was(tiny_path: Path) -> None:
    with Engine.open(tiny_path, n_ctx=4096, n_ubatch=64, n_threads=1) as engine:
        engine.prefill(TOKENS)
        whole_s = engine.prefill([7] * 3800).prefill_s
        engine.keep_state(len(TOKENS))
        for part in (0.1, 0.2, 0.3):
            result = cancel_when_running(engine, [7] * 3800, part * whole_s)
            assert result.cancelled and 0 < result.n_tokens < 3800
            assert engine.position == len(TOKENS)
        engine.prefill([1, 2, 3])
        after = engine.logits()
    with Engine.open(tiny_path, n_ctx=4096, n_ubatch=64, n_threads=1) as engine:
        engine.prefill(TOKENS)
        engine.prefill([1, 2, 3])
        np.testing.assert_array_equal(engine.logits(), after)


def test_cancel_before_a_prefill_refuses_it_and_clear_forgets(engine: Engine) -> None:
    engine.cancel()
    result = engine.prefill([1, 2])
    assert result.cancelled and result.n_tokens == 0 and engine.position == 0
    assert not engine.prefill([1, 2]).cancelled
    engine.cancel()
    engine.clear_cancel()
    assert not engine.prefill([1, 2]).cancelled


def test_a_state_only_loads_where_it_fits(tiny_path: Path, moe_path: Path, tmp_path: Path) -> None:
    with Engine.open(tiny_path, n_ctx=512) as engine:
        engine.prefill([3] * 200)
        state = engine.save_state()
    other_seed = tiny.write(tmp_path / "other.gguf", seed=2, n_ctx_train=4096)
    with Engine.open(tiny_path, n_ctx=128) as small:
        small.prefill([1, 2])
        with pytest.raises(StateError, match=r"200.*128"):
            small.load_state(state)
        assert small.position == 2
    for path, options, why in [
        (tiny_path, {"kv_type": "f32"}, "KV type"),
        (moe_path, {}, "another model"),
        (other_seed, {}, "another model"),
    ]:
        with Engine.open(path, **options) as engine:
            engine.prefill([1, 2])
            with pytest.raises(StateError, match=why):
                engine.load_state(state)
            assert engine.position == 2
    with Engine.open(tiny_path, n_ctx=300) as engine:
        engine.load_state(state)
        assert engine.position == 200


def test_damaged_states_are_refused(engine: Engine) -> None:
    engine.prefill(TOKENS[:50])
    state = bytes(engine.save_state())
    for wrong, why in [
        (b"", "header"),
        (state[:20], "header"),
        (b"x" * len(state), "no state"),
        (state[:-1], "cut short"),
        (state + b"x", "cut short"),
    ]:
        with pytest.raises(StateError, match=why):
            engine.load_state(wrong)
        assert engine.position == 50
    # A bit anywhere behind the header; the state that is there stays.
    for at in (60, 100, len(state) // 2, len(state) - 1):
        damaged = bytearray(state)
        damaged[at] ^= 4
        with pytest.raises(StateError, match="damaged"):
            engine.load_state(damaged)
        assert engine.position == 50
    engine.drop_state()
    engine.load_state(state)
    assert engine.position == 50


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2000), value=st.integers(0, 255))
def test_no_flipped_byte_of_a_state_crashes(fuzzed: tuple[Engine, bytes], at: int, value: int) -> None:
    engine, state = fuzzed
    changed = bytearray(state)
    changed[at % len(changed)] = value
    try:
        engine.load_state(changed)
    except StateError:
        pass
    else:
        engine.prefill([1])
    assert 0 <= engine.position <= 256


@pytest.fixture(scope="module")
def fuzzed(tiny_path: Path) -> tuple[Engine, bytes]:
    engine = Engine.open(tiny_path, n_ctx=256, n_threads=1)
    engine.prefill([1, 2, 3])
    return engine, bytes(engine.save_state())


def test_an_inspected_engine_computes_nothing(tiny_path: Path) -> None:
    with Engine.open(tiny_path, inspect=True) as engine:
        assert engine.info.n_vocab == 267 and engine.info.n_ctx == 0
        assert engine.text_tokens("abc", add_bos=False)
        for use in (lambda: engine.prefill([1]), engine.logits, engine.save_state, engine.drop_state):
            with pytest.raises(UnsupportedError, match="inspect"):
                use()


def test_a_poll_hook_stops_a_prefill(tiny_path: Path) -> None:
    f, c = ffi(), lib()
    seen: list[int] = []

    @f.callback("bmoe_poll_fn")  # type: ignore[untyped-decorator, unused-ignore]
    def poll(_user: object) -> int:
        seen.append(1)
        return len(seen) == 2

    params, out = f.new("bmoe_open_params *"), f.new("bmoe_engine **")
    c.bmoe_open_params_init(params)
    params.n_ubatch, params.n_threads, params.poll = 1, 1, poll
    assert c.bmoe_open(out, bytes(tiny_path), params, f.NULL, 0) == c.BMOE_OK
    tokens = f.new("int32_t[]", [7] * 4000)
    assert c.bmoe_prefill(out[0], tokens, 4000, f.NULL) == c.BMOE_E_CANCELLED
    assert len(seen) == 2 and c.bmoe_position(out[0]) == 0
    c.bmoe_close(out[0])


CTRL_C = """
import sys, time
from bmoe_native import Engine
with Engine.open(sys.argv[1], n_ctx=4096, n_ubatch=16, n_threads=1) as engine:
    for round in range(2):
        print("ready", flush=True)
        try:
            while True:
                engine.drop_state()
                engine.prefill([7] * 4000)
        except KeyboardInterrupt:
            engine.drop_state()
            engine.prefill([1, 2, 3])
            print("interrupted", engine.position, flush=True)
"""


def test_ctrl_c_stops_a_prefill_and_leaves_the_engine_usable(tiny_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CTRL_C, str(tiny_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted 3\n"
    assert process.wait(timeout=60) == 0
    process.stdout.close()


ONE_CPU = """
import os, resource, sys
from bmoe_native import Engine
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with Engine.open(sys.argv[1], n_ctx=4096, n_threads=2) as engine:
    engine.prefill([7] * 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    engine.prefill([7] * 3000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
"""


def test_threads_that_share_a_cpu_give_way_to_each_other(tiny_path: Path) -> None:
    """ggml alone would spin through each wait, and leave the CPU by itself only between graphs, which are 6 here."""
    done = subprocess.run([sys.executable, "-c", ONE_CPU, str(tiny_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100


def test_progress_can_stop_a_load(tiny_path: Path) -> None:
    seen: list[float] = []

    def stop(fraction: float) -> None:
        seen.append(fraction)
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Engine.open(tiny_path, on_progress=stop)
    assert len(seen) == 1
    Engine.open(tiny_path, on_progress=seen.append).close()
    assert seen[-1] == 1.0 and seen[1:] == sorted(seen[1:])
