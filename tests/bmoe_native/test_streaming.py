"""Streamed experts: what is read, kept and given back, and what happens when a read goes wrong."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, ReadError, Streaming, UnsupportedError
from tests import tiny
from tests.shim import preloaded

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "m.gguf", arch="qwen3moe")


@pytest.fixture
def resident(path: Path) -> np.ndarray:
    with Engine.open(path, n_threads=1, repack=False) as engine:
        engine.prefill(TOKENS)
        return engine.logits()


def opened(path: Path, **options: object) -> Engine:
    return Engine.open(path, n_threads=1, streaming=Streaming(**options))  # type: ignore[arg-type]


def test_nothing_is_kept_without_a_cache_and_everything_in_one_that_holds_it(path: Path) -> None:
    with opened(path, cache_bytes=0, prefetch="off") as engine:
        for _ in range(2):
            engine.drop_state()
            result = engine.prefill(TOKENS)
            assert result.n_hits == 0 < result.n_misses
            assert result.routed_bytes <= result.read_bytes < 1.3 * result.routed_bytes  # blocks around the slices
            assert engine.counters().resident_bytes == 0
    # A guess that is wrong each time may be read each time.
    with opened(path, cache_bytes=1 << 30, prefetch="off") as engine:
        first = engine.prefill(TOKENS)
        engine.drop_state()
        second = engine.prefill(TOKENS)
        assert first.read_bytes > 0 == second.read_bytes == second.n_misses
        assert second.n_hits == first.n_hits + first.n_misses
        assert engine.counters().resident_bytes <= engine.info.experts_bytes == engine.info.streamed_bytes


def test_the_cache_stays_within_its_budget_and_follows_a_new_one(path: Path, resident: np.ndarray) -> None:
    with opened(path, cache_bytes=1 << 30) as engine:
        engine.prefill(TOKENS)
        whole = engine.counters().resident_bytes
        for budget in (whole // 2, whole // 5, 0, whole):
            engine.set_cache(budget)
            assert engine.counters().resident_bytes <= budget
            assert engine.info.cache_bytes == 1 << 30  # as opened
            engine.drop_state()
            engine.prefill(TOKENS)
            np.testing.assert_array_equal(engine.logits(), resident)
            assert engine.counters().resident_bytes <= budget


def test_what_is_given_back_is_memory(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="granitehybrid")

    def anonymous() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

    with opened(path, cache_bytes=1 << 30) as engine:
        engine.prefill(TOKENS)
        held, before = engine.counters().resident_bytes, anonymous()
        engine.set_cache(0)
        assert before - anonymous() > 0.8 * held > 1 << 20


@pytest.mark.parametrize("prefetch", ["both", "previous", "router"])
def test_what_is_guessed_is_read_ahead_and_changes_no_bit(path: Path, resident: np.ndarray, prefetch: str) -> None:
    with opened(path, cache_bytes=0, prefetch=prefetch) as engine:
        first = engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)
        assert (first.ahead_bytes > 0) == (prefetch != "previous")  # nothing was asked for before
        engine.drop_state()
        assert engine.prefill(TOKENS).ahead_bytes > 0
        np.testing.assert_array_equal(engine.logits(), resident)
    with pytest.raises(ArgumentError, match="prefetch is 'x', allowed are both, previous, router, off"):
        opened(path, prefetch="x")


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen3moe-split", "gemma4", "deepseek2"])
def test_dense_weights_in_anonymous_memory_change_no_bit(arch: str, repack: bool, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    logits = []
    for dense, direct in (("mmap", True), ("anon", True), ("anon", False)):
        streaming = Streaming(cache_bytes=0, dense=dense, direct=direct)
        with Engine.open(path, n_threads=1, repack=repack, streaming=streaming) as engine:
            if dense == "anon":
                maps = Path("/proc/self/maps").read_text()
                assert path.name not in maps
            engine.prefill(TOKENS)
            logits.append(engine.logits())
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


def test_dense_weights_are_read_once_and_no_expert_with_them(path: Path) -> None:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])

    with opened(path, cache_bytes=0, dense="anon"):
        pass  # what else is read at the first open is in the page cache now
    before = read()
    with opened(path, cache_bytes=0, dense="anon") as engine:
        dense = engine.info.weights_bytes - engine.info.streamed_bytes
        assert 0.9 * dense < read() - before < 1.5 * dense + 2**18


def test_dense_is_one_of_two(path: Path) -> None:
    with pytest.raises(ArgumentError, match="dense is 'ram', allowed are mmap, anon"):
        opened(path, dense="ram")


def test_dense_weights_that_cannot_be_read_are_an_error_at_open(path: Path, shim: Path) -> None:
    program = """
        import os, sys
        from bmoe_native import Engine, ModelError, Streaming
        os.environ["FAULT"] = "dead"
        try:
            Engine.open(sys.argv[1], streaming=Streaming(dense="anon"))
        except ModelError as error:
            print(error)
        os.environ["FAULT"] = "none"
        Engine.open(sys.argv[1], streaming=Streaming(dense="anon")).close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), path]
    done = subprocess.run(command, env=preloaded(shim), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot read" in done.stdout and "m.gguf: Input/output error" in done.stdout


def test_a_load_is_cancelled_while_dense_weights_are_read(path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(_fraction: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        Engine.open(path, streaming=Streaming(dense="anon"), on_progress=stop)


def test_a_file_cut_in_use_ends_no_process_where_dense_weights_are_in_memory(path: Path) -> None:
    program = """
        import os, sys
        from bmoe_native import Engine, ReadError, Streaming
        path = sys.argv[1]
        heard = []
        def cut(routing):
            if not heard:
                os.truncate(path, 4096)
            heard.append(routing)
        streaming = Streaming(cache_bytes=0, dense="anon", prefetch="off")
        with Engine.open(path, n_threads=1, streaming=streaming, on_routing=cut) as engine:
            try:
                engine.prefill([1, 2, 3])
            except ReadError as error:
                print(len(heard), engine.position, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 0 expert ") and "the file ends before that" in done.stdout


def test_a_budget_above_what_there_is_is_said(path: Path) -> None:
    # Of all experts no more than there are is ever kept, so that a large number alone is no reason.
    said: list[str] = []
    Engine.open(path, streaming=Streaming(cache_bytes=1 << 50), on_log=lambda _, text: said.append(text)).close()
    assert not said


def test_too_few_file_descriptors_are_an_error_that_says_so(path: Path) -> None:
    program = """
        import os, resource, sys
        from bmoe_native import Engine, ModelError, Streaming
        Engine.open(sys.argv[1], streaming=Streaming()).close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd")) - 1
        outcomes = []
        for n_free in range(6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + n_free, hard))
            try:
                with Engine.open(sys.argv[1], streaming=Streaming(dense="anon")) as engine:
                    engine.prefill([1, 2, 3])
                outcomes.append("")
            except ModelError as error:
                outcomes.append(str(error))
        print("\\n".join(outcomes))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split("\n")[:-1]
    assert len(outcomes) == 6 and outcomes[-1] == ""
    failed = [text for text in outcomes if text]
    assert len(failed) >= 2 and all("Too many open files" in text and "m.gguf" in text for text in failed), outcomes


def test_a_budget_of_less_than_an_expert_for_each_layer_is_used(path: Path) -> None:
    with opened(path, cache_bytes=0) as engine:
        one = engine.info.streamed_bytes // (engine.info.n_moe_layer * engine.info.n_expert)
    with opened(path, cache_bytes=2 * one, prefetch="off") as engine:
        engine.prefill(TOKENS)
        assert engine.counters().resident_bytes == 2 * one
        engine.drop_state()
        assert engine.prefill(TOKENS).n_hits == 2


def test_a_dense_model_has_nothing_to_stream(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "dense.gguf", arch="llama")
    with opened(path) as engine, Engine.open(path, n_threads=1) as plain:
        assert not engine.info.is_streamed
        for one in (engine, plain):
            one.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), plain.logits())
        with pytest.raises(UnsupportedError, match="nothing streams"):
            engine.set_cache(1)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"io_threads": 65}, "io_threads is 65"), ({"cache_bytes": -2}, "cache_bytes is -2"), ({"io_threads": -1}, "-1")],
)
def test_options_out_of_range_are_refused(path: Path, options: dict[str, int], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        opened(path, **options)


def test_inspecting_streams_nothing(path: Path) -> None:
    with Engine.open(path, inspect=True, streaming=Streaming()) as engine:
        assert not engine.info.is_streamed


def test_a_cancel_leaves_no_reads_behind(path: Path, resident: np.ndarray) -> None:
    with Engine.open(path, n_threads=1, n_ubatch=16, streaming=Streaming(cache_bytes=0)) as engine:
        engine.cancel()
        assert engine.prefill(TOKENS).cancelled
        engine.prefill(TOKENS[:32])
    with opened(path, cache_bytes=0) as engine:
        engine.cancel()
        assert engine.prefill(TOKENS).cancelled
        engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)


@pytest.mark.parametrize("how", ["cut", "touched", "grown"])
def test_a_file_that_changes_in_use_is_an_error_that_names_it(path: Path, how: str) -> None:
    whole = path.read_bytes()
    with opened(path, cache_bytes=0) as engine:
        engine.prefill(TOKENS)
        if how == "touched":
            os.utime(path, ns=(1, 1))
        else:
            os.truncate(path, len(whole) // 2 if how == "cut" else len(whole) + 1)
        engine.drop_state()
        with pytest.raises(ReadError, match=r"changed while it was open.*m\.gguf"):
            engine.prefill(TOKENS)


def test_a_file_that_is_replaced_or_removed_is_read_on(path: Path, resident: np.ndarray, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other.gguf", arch="qwen3moe", seed=9)
    with opened(path, cache_bytes=0) as engine:
        engine.prefill(TOKENS)
        os.replace(other, path)
        engine.drop_state()
        engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)


def test_where_direct_reads_are_refused_the_page_cache_serves(path: Path, resident: np.ndarray) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    copy = shm / f"bmoe-{os.getpid()}.gguf"
    shutil.copy(path, copy)
    try:
        with opened(copy, cache_bytes=0) as engine:
            engine.prefill(TOKENS)
            np.testing.assert_array_equal(engine.logits(), resident)
    finally:
        copy.unlink()


PROGRAM = """
    import os, sys
    import numpy as np
    from bmoe_native import Engine, ReadError, Streaming
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(sys.argv[1], n_threads=1, streaming=Streaming(cache_bytes=1 << 30)) as engine:
        os.environ["FAULT"] = sys.argv[3]  # putenv: the shim sees it from here on
        try:
            engine.prefill(tokens)
        except ReadError as error:
            print("error", engine.position, error)
            os.environ["FAULT"] = "none"
            engine.prefill(tokens)
        sys.stdout.flush()
        sys.stdout.buffer.write(engine.logits().tobytes())
"""


@pytest.mark.parametrize("fault", ["short", "einval", "eintr", "eio"])
def test_reads_that_stop_early_or_fail(path: Path, resident: np.ndarray, shim: Path, fault: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), path, " ".join(map(str, TOKENS)), fault]
    done = subprocess.run(command, env=preloaded(shim), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout[: len(done.stdout) - resident.nbytes].decode()
    if fault == "eio":
        assert "Input/output error" in said and "m.gguf" in said and "expert " in said and " of layer " in said
        assert said.startswith("error 0 ")
    else:
        assert said == ""
    np.testing.assert_array_equal(np.frombuffer(done.stdout[-resident.nbytes :], np.float32), resident)


def test_fewer_experts_per_token_are_another_model_and_fewer_bytes(path: Path, resident: np.ndarray) -> None:
    with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0), n_expert_used=2) as engine:
        two = engine.prefill(TOKENS).routed_bytes
        np.testing.assert_array_equal(engine.logits(), resident)
    with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0), n_expert_used=1) as engine:
        assert engine.info.n_expert_used == 1
        assert engine.prefill(TOKENS[:5]).routed_bytes < two
        engine.drop_state()
        engine.prefill(TOKENS)
        assert (engine.logits() != resident).any()


def test_more_experts_than_there_are_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="9 experts per token are asked for, and this model has 8"):
        Engine.open(path, n_expert_used=9)
    with pytest.raises(ArgumentError, match="this model has 0"):
        Engine.open(tiny.write(tmp_path / "dense.gguf"), n_expert_used=1)


SLOW = """
    import os, sys, threading
    import numpy as np
    from bmoe_native import Engine, Streaming
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(sys.argv[1], n_threads=1, streaming=Streaming(cache_bytes=0, io_threads=1)) as engine:
        os.environ["FAULT"] = "slow"
        threading.Timer(0.5, engine.cancel).start()
        result = engine.prefill(tokens)
        assert result.cancelled and engine.position == 0, result
        assert 0 < result.n_misses < 24, result  # of three layers with eight experts: it did not go on
        assert result.read_bytes < engine.info.experts_bytes / 6, result  # nor read the first layer to its end
        os.environ["FAULT"] = "none"
        engine.clear_cancel()
        engine.prefill(tokens)
        sys.stdout.buffer.write(engine.logits().tobytes())
"""


def test_a_cancel_is_noticed_while_reads_are_waited_for(path: Path, resident: np.ndarray, shim: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SLOW), path, " ".join(map(str, TOKENS))]
    done = subprocess.run(command, env=preloaded(shim), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), resident)
