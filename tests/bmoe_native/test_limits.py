"""What runs out, is forbidden or is shared: threads, descriptors, disks, rights. Each in a process of its own."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe_native import Engine
from bmoe_native._lib import ffi, lib
from tests import tiny
from tests.bmoe_native.test_c_errors import calls

N_THREADS, N_CALLS = 8, 200
BEGIN = """
import os, resource, sys, threading
from bmoe_native import Engine, EngineError, EngineMemoryError, ModelError
from bmoe_native._lib import lib
lib()
path = sys.argv[1]
def tell(**options):
    try:
        with Engine.open(path, n_ctx=64, n_ubatch=32, **options) as engine:
            engine.prefill([1, 2, 3])
            print("decided", engine.logits().shape[0])
    except EngineError as error:
        print(type(error).__name__, error)
"""


def run_python(code: str, path: Path) -> list[str]:
    command = [sys.executable, "-c", BEGIN + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd())
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def handle(tiny_path: Path) -> Iterator[Any]:
    out = ffi().new("bmoe_engine **")
    params = ffi().new("bmoe_open_params *")
    lib().bmoe_open_params_init(params)
    params.n_ctx, params.n_threads = 256, 1
    assert lib().bmoe_open(out, bytes(tiny_path), params, ffi().NULL, 0) == 0
    yield out[0]
    lib().bmoe_close(out[0])


def in_threads(body: Any) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_what_any_thread_may_call_at_any_time(handle: Any) -> None:
    """While another thread prefills: none is refused, and each thread's error text is its own."""
    c, f = lib(), ffi()
    ended = threading.Event()

    def prefill() -> None:
        tokens = f.new("int32_t[]", [1] * 64)
        while not ended.is_set():
            assert c.bmoe_prefill(handle, tokens, 64, f.NULL) in (c.BMOE_OK, c.BMOE_E_CANCELLED, c.BMOE_E_BUSY)
            c.bmoe_state_drop(handle)

    def body(number: int) -> None:
        params, sampling = f.new("bmoe_open_params *"), f.new("bmoe_sampling *")
        never_opened = f.cast("bmoe_engine *", 0x9990 + 16 * number)
        for _ in range(N_CALLS):
            assert c.bmoe_abi_version() == c.BMOE_ABI_VERSION
            assert f.string(c.bmoe_build_info()).startswith(b"bmoe ")
            c.bmoe_open_params_init(params)
            c.bmoe_sampling_init(sampling)
            assert params.size_bytes == f.sizeof("bmoe_open_params") and sampling.top_p == 1.0
            assert c.bmoe_cancel(handle) == c.bmoe_cancel_clear(handle) == c.BMOE_OK
            assert c.bmoe_position(never_opened) == c.BMOE_E_CLOSED
            assert b"not open" in f.string(c.bmoe_last_error(never_opened))
            c.bmoe_close(never_opened)

    worker = threading.Thread(target=prefill)
    worker.start()
    try:
        in_threads(body)
    finally:
        ended.set()
        worker.join()


def test_any_call_from_any_thread_is_served_or_refused(handle: Any) -> None:
    """All calls of one engine at once, 1,600 in all: a documented status each time, and the engine is whole after."""
    c = lib()
    allowed = {c.BMOE_E_BUSY, c.BMOE_E_CANCELLED, c.BMOE_E_STATE, c.BMOE_E_TOO_SMALL, c.BMOE_E_UNSUPPORTED}
    seen: set[int] = set()

    def body(number: int) -> None:
        mine, draw = calls(), random.Random(number)
        for _ in range(N_CALLS):
            name = draw.choice(list(mine))
            status = mine[name](handle)
            seen.add(status)
            assert status >= 0 or status in (allowed | {c.BMOE_E_TOO_LONG}), (name, status)

    in_threads(body)
    assert c.BMOE_E_BUSY in seen
    assert c.bmoe_cancel_clear(handle) == c.bmoe_state_drop(handle) == c.BMOE_OK
    mine = calls()
    assert mine["prefill"](handle) == mine["logits"](handle) == c.BMOE_OK


def test_engines_of_one_file_are_independent(tiny_path: Path) -> None:
    """Opened, used and closed by eight threads at once: the bits of one alone."""
    tokens = [1 + n % 200 for n in range(50)]
    with Engine.open(tiny_path, n_ctx=64, n_threads=1) as alone:
        alone.prefill(tokens)
        expected = alone.logits()

    def body(number: int) -> None:
        for _ in range(6):
            with Engine.open(tiny_path, n_ctx=64, n_threads=1) as engine:
                for _ in range(N_CALLS // 6):
                    engine.drop_state()
                    engine.prefill(tokens)
                np.testing.assert_array_equal(engine.logits(), expected)

    in_threads(body)


@pytest.mark.parametrize("streaming", ["None", "Streaming()"])
def test_no_descriptors_left(tmp_path: Path, streaming: str) -> None:
    path = tiny.write(tmp_path / "model.gguf", arch="qwen3moe")
    code = f"""
from bmoe_native import Streaming
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(len(os.listdir("/proc/self/fd")))
for n_free in range(8):
    held = []
    try:
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
    for _ in range(n_free): os.close(held.pop())
    tell(streaming={streaming})
    for number in held: os.close(number)
tell(streaming={streaming})
print(len(os.listdir("/proc/self/fd")))
"""
    before, *lines, after = run_python(code, path)
    assert lines[0].startswith("ModelError") and "Too many open files" in lines[0]
    assert lines[7] == lines[8] == "decided 267"
    assert all(line.startswith(("ModelError", "decided")) for line in lines)
    assert before == after  # none was left open


@pytest.mark.parametrize("options", ["n_threads=4", "n_threads=1, streaming=Streaming(io_threads=4)"])
def test_no_thread_can_be_started(tmp_path: Path, options: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("the limit of threads is per user, and only root can become one that has none")
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
    code = f"""
from bmoe_native import Streaming
os.chmod(path, 0o444)
held = os.open(path, os.O_RDONLY)
path = f"/proc/self/fd/{{held}}"
os.setresuid(64998, 64998, 64998)
import ctypes; ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
tell({options})
tell(n_threads=1)
"""
    lines = run_python(code, path)
    assert lines[0].startswith("EngineMemoryError cannot start 4 threads"), lines
    assert lines[1] == "decided 267"


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "secret.gguf")
    path.chmod(0)
    (line,) = run_python("if os.geteuid() == 0: os.seteuid(64998)\ntell()\n", path)
    assert line.startswith("ModelError") and "Permission denied" in line and "secret.gguf" in line


def test_nothing_is_written_to_any_file(tmp_path: Path) -> None:
    """So a full disk or one that is read-only is all the same: here no process may make a file of a byte."""
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
    path.chmod(0o444)
    code = "import signal\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nfrom bmoe_native import Streaming\n"
    # stdout is a pipe, which that limit is not for
    assert run_python(code + "tell()\ntell(streaming=Streaming())\n", path) == ["decided 267"] * 2
