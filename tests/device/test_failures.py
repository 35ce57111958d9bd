"""After a cancel or an error the weights are back on the host; a device that is gone is said to be gone."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bmoe_native import Engine, ReadError, Streaming
from tests import tiny
from tests.bmoe_native.test_streaming import SHIM
from tests.device.server import Server

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
    from bmoe_native import Engine, ReadError, Streaming
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


def test_an_expert_that_cannot_be_read_for_the_device(paths: dict[str, Path], server: Server, tmp_path: Path) -> None:
    path = paths["qwen3moe"]
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    command = [sys.executable, "-c", textwrap.dedent(UNREADABLE), path, " ".join(map(str, TOKENS)), server.name()]
    env = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    wanted = cpu_logits(path, len(TOKENS))
    said = done.stdout[: len(done.stdout) - wanted.nbytes].decode()
    assert said.startswith("error 0 expert ") and " of layer " in said and "Input/output error" in said
    np.testing.assert_array_equal(np.frombuffer(done.stdout[-wanted.nbytes :], np.float32), wanted)


def test_a_file_that_changed_is_not_read_for_the_device(server: Server, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
    with Engine.open(path, n_ubatch=64, prefill_device=server.name(), streaming=Streaming(cache_bytes=0)) as engine:
        engine.prefill(TOKENS[:64])
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1000)
        with pytest.raises(ReadError, match="the model file changed while it was open"):
            engine.prefill(TOKENS[64:128])


KILLED = """
    import sys
    from bmoe_native import Engine
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(sys.argv[1], n_ubatch=64, prefill_device=sys.argv[3]) as engine:
        engine.prefill(tokens[:64])
        print("ready", flush=True)
        sys.stdin.readline()
        engine.prefill(tokens)
        print("computed", flush=True)
"""


def test_a_server_that_dies_ends_the_process_with_the_reason(paths: dict[str, Path], rpc_library: None) -> None:
    """ggml's RPC client knows no other end. What matters is that nothing hangs, and that the next engine opens."""
    server = Server()
    command = [sys.executable, "-c", textwrap.dedent(KILLED), paths["llama"], " ".join(map(str, TOKENS)), server.name()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        server.kill()
        out, said = process.communicate("go\n", timeout=30)
    assert process.returncode < 0 and out == ""
    assert "Remote RPC server crashed" in said
    again = Server()
    with Engine.open(paths["llama"], n_ubatch=64, prefill_device=again.name()) as engine:
        assert engine.prefill(TOKENS).dev_tokens == 300
    again.kill()
