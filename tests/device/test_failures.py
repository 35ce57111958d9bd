"""After a cancel or an error the weights are back on the host; a device that is gone is said to be gone."""

import contextlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from bmoe_native import ClosedError, Engine, EngineError, ReadError, Streaming
from tests import tiny
from tests.device.server import Server
from tests.shim import preloaded
from tests.tiny.family import N_EXPERT

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 300)]


def cpu_logits(path: Path, n_tokens: int, n_ubatch: int = 64) -> np.ndarray:
    with Engine.open(path, n_ubatch=n_ubatch, n_threads=1, repack=False) as engine:
        engine.prefill(TOKENS[:n_tokens])
        return engine.logits()


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancel_is_noticed_and_leaves_nothing_behind(
    streamed: bool, after_s: float, paths: dict[str, Path], server: Server
) -> None:
    path = paths["qwen3moe"]
    streaming = Streaming(cache_bytes=0) if streamed else None
    with Engine.open(
        path, n_ubatch=64, n_threads=1, repack=False, prefill_device=server.name("slow=30"), streaming=streaming
    ) as engine:
        threading.Timer(after_s, engine.cancel).start()
        begin = time.monotonic()
        result = engine.prefill(TOKENS)
        assert result.cancelled and engine.position == 0
        assert time.monotonic() - begin < after_s + 0.5
        engine.clear_cancel()
        # Narrow, on the CPU: weights that were left on the device would end the process here.
        engine.prefill(TOKENS[:20])
        np.testing.assert_array_equal(engine.logits(), cpu_logits(path, 20))
        engine.drop_state()
        engine.prefill(TOKENS[:64])
        np.testing.assert_array_equal(engine.logits(), cpu_logits(path, 64))


UNREADABLE = """
    import os, sys
    from bmoe_native import ClosedError, Engine, EngineError, ReadError, Streaming
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(
        sys.argv[1], n_ubatch=64, n_threads=1, prefill_device=sys.argv[3], streaming=Streaming(cache_bytes=0)
    ) as engine:
        os.environ["FAULT"] = "eio"
        try:
            engine.prefill(tokens)
        except ReadError as error:
            print("error", engine.position, error)
        os.environ["FAULT"] = "none"
        engine.prefill(tokens[:20])
        engine.drop_state()
        engine.prefill(tokens)
        assert engine.counters().dev_tokens > 0
        sys.stdout.flush()
        sys.stdout.buffer.write(engine.logits().tobytes())
"""


def test_an_expert_that_cannot_be_read_for_the_device(paths: dict[str, Path], server: Server, shim: Path) -> None:
    path = paths["qwen3moe"]
    command = [sys.executable, "-c", textwrap.dedent(UNREADABLE), path, " ".join(map(str, TOKENS)), server.name()]
    done = subprocess.run(command, env=preloaded(shim), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    wanted = cpu_logits(path, len(TOKENS))
    said = done.stdout[: len(done.stdout) - wanted.nbytes].decode()
    assert said.startswith("error 0 expert ") and " of layer " in said and "Input/output error" in said
    np.testing.assert_array_equal(np.frombuffer(done.stdout[-wanted.nbytes :], np.float32), wanted)


UNREADABLE_FOR_GOOD = """
    import os, sys
    from bmoe_native import Engine, ReadError, Streaming
    begin, slice_bytes = map(int, sys.argv[3:])
    asked = [set() for _ in range(8)]
    with Engine.open(
        sys.argv[1],
        n_ubatch=64,
        n_threads=1,
        prefill_device=sys.argv[2],
        streaming=Streaming(cache_bytes=0, direct=False),
        on_routing=lambda routing: asked[routing.layer].update(routing.experts.ravel().tolist()),
    ) as engine:
        def experts(token):
            asked[1].clear()
            engine.drop_state()
            assert engine.prefill([token] * 40).dev_tokens == 40
            return set(asked[1])
        of = {token: experts(token) for token in range(30)}
        with_it, without = next((a, b) for a in of for b in of if of[a] - of[b])
        expert = min(of[with_it] - of[without])
        os.environ["FAULT"] = f"at{begin + expert * slice_bytes}"
        for token in (with_it, with_it, without, with_it, without):
            try:
                print("read", experts(token) == of[token])
            except ReadError as error:
                print(f"expert {expert} of layer 1" in str(error))
        os.environ["FAULT"] = "none"
        print(engine.prefill([with_it] * 40).dev_tokens)
"""


def test_an_expert_that_cannot_be_read_is_not_missed_where_it_is_only_foreseen(
    paths: dict[str, Path], server: Server, shim: Path
) -> None:
    path = paths["qwen3moe"]
    weights = next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.ffn_up_exps.weight")
    numbers = [weights.data_offset, weights.n_bytes // N_EXPERT]
    command = [sys.executable, "-c", textwrap.dedent(UNREADABLE_FOR_GOOD), path, server.name(), *map(str, numbers)]
    done = subprocess.run(command, env=preloaded(shim), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "True", "read True", "True", "read True", "40"]


def test_a_file_that_changed_is_not_read_for_the_device(server: Server, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
    with Engine.open(path, n_ubatch=64, prefill_device=server.name(), streaming=Streaming(cache_bytes=0)) as engine:
        engine.prefill(TOKENS[:64])
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1000)
        with pytest.raises(ReadError, match="the model file changed while it was open"):
            engine.prefill(TOKENS[64:128])


@contextlib.contextmanager
def killed_after(server: Server, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, server.kill)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_a_device_that_is_lost_costs_the_engine_and_not_the_process(
    after_s: float, streamed: bool, paths: dict[str, Path], rpc_library: None
) -> None:
    """Nothing hangs, the reason is told, and other engines, also new ones, go on."""
    path = paths["qwen3moe"]
    streaming = Streaming(cache_bytes=0) if streamed else None
    server = Server()
    with Engine.open(path, n_ubatch=64, n_threads=1, repack=False) as other:
        with Engine.open(
            path, n_ubatch=64, n_threads=2, prefill_device=server.name("slow=10"), streaming=streaming
        ) as engine:
            engine.prefill(TOKENS[:64])
            if after_s == 0:
                server.kill()
            with killed_after(server, after_s), pytest.raises(EngineError, match=r"the prefill device was lost: .*RPC"):
                engine.prefill(TOKENS[64:])
            for call in (engine.logits, engine.drop_state, engine.save_state, lambda: engine.prefill(TOKENS[:20])):
                with pytest.raises(EngineError, match=r"was lost before .*can only be closed"):
                    call()
            assert engine.tokenize("hi")
        with pytest.raises(ClosedError):
            engine.logits()
        other.prefill(TOKENS)
        np.testing.assert_array_equal(other.logits(), cpu_logits(path, len(TOKENS)))
    again = Server()
    with Engine.open(path, n_ubatch=64, n_threads=1, prefill_device=again.name(), streaming=streaming) as engine:
        assert engine.prefill(TOKENS).dev_tokens == 300
        np.testing.assert_array_equal(engine.logits(), cpu_logits(path, len(TOKENS)))
    again.kill()


@pytest.mark.parametrize(("fault", "streamed"), [("load", False), ("load", True), ("router", True)])
def test_a_device_that_throws_is_lost(fault: str, streamed: bool, paths: dict[str, Path], rpc_library: None) -> None:
    """Backends in C++ do, on the thread that asks them, and again when they are asked for their buffers."""
    streaming = Streaming(cache_bytes=0) if streamed else None
    server = Server()  # of its own: a lost engine keeps its connection, and there is one at a time
    device = server.name(f"throwing_{fault}")
    with Engine.open(paths["qwen3moe"], n_ubatch=64, prefill_device=device, streaming=streaming) as engine:
        with pytest.raises(EngineError, match=r"the prefill device was lost: ErrorDeviceLost"):
            engine.prefill(TOKENS[:64])
        with pytest.raises(EngineError, match=r"was lost before .*can only be closed"):
            engine.prefill(TOKENS[:20])
    server.kill()


def test_a_device_that_is_lost_between_two_calls(paths: dict[str, Path], rpc_library: None) -> None:
    """Closing asks it for its buffers."""
    server = Server()
    engine = Engine.open(paths["llama"], n_ubatch=64, prefill_device=server.name())
    engine.prefill(TOKENS[:64])
    server.kill()
    assert engine.logits().size == engine.info.n_vocab
    engine.close()
    with Engine.open(paths["llama"], n_ubatch=64) as other:
        other.prefill(TOKENS)


def test_hooks_run_on_the_thread_that_called(paths: dict[str, Path], server: Server) -> None:
    """Also those of a graph that is computed on the device's thread."""
    threads: dict[str, set[int]] = {}

    def seen(name: str) -> None:
        threads.setdefault(name, set()).add(threading.get_ident())

    with Engine.open(
        paths["qwen3moe"],
        n_ubatch=64,
        prefill_device=server.name("slow=10"),
        log_level=1,
        on_log=lambda _level, _text: seen("log"),
        on_progress=lambda _share: seen("progress"),
        on_routing=lambda _routing: seen("routing"),
        on_layer=lambda _layer, _state: seen("layer"),
    ) as engine:
        engine.prefill(TOKENS)
    assert threads == {name: {threading.get_ident()} for name in ("log", "progress", "routing", "layer")}
