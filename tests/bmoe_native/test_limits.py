"""What runs out or is forbidden: threads, descriptors, disks, rights. Each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

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
    refused = [line for line in lines if line.startswith("ModelError")]
    assert refused and all("Too many open files" in line for line in refused)
    assert lines[7] == lines[8] == "decided 267"
    assert all(line.startswith(("ModelError", "decided")) for line in lines)
    assert before == after  # none was left open


def test_no_descriptors_left_for_an_engine_that_is_open(tmp_path: Path) -> None:
    """Reading the head needs one, for the moment, and nothing else does."""
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
    code = """
from bmoe_native import ReadError, Streaming
for streaming in (None, Streaming(cache_bytes=0)):
    with Engine.open(path, n_ctx=64, streaming=streaming, on_layer=lambda *_: None) as engine:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        engine.prefill([1, 2, 3])
        engine.load_state(engine.save_state())
        engine.prefill(engine.tokenize("x" * 50))
        engine.sample()
        engine.render([("user", "hi")])
        if streaming: engine.set_cache(1000)
        row = engine.logits()
        for call in (engine.head, lambda: engine.head_rows([1]), lambda: engine.head_logits(row[None, :64], [1])):
            try:
                call()
            except ReadError as error:
                print(str(error).split(": ")[-1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(engine.head().norm_weight.shape == (64,), (engine.logits() == row).all(), engine.position)
"""
    assert run_python(code, path) == [*["Too many open files"] * 3, "True True 53"] * 2


NO_THREADS = """
from bmoe_native import Streaming
os.chmod(path, 0o444)
file = os.open(path, os.O_RDONLY)
path = f"/proc/self/fd/{file}"
os.setresuid(64998, 64998, 64998)
import ctypes; ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1000))
"""


def without_threads(code: str, path: Path) -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("the limit of threads is per user, and only root can become one that has none")
    return run_python(NO_THREADS + code, path)


@pytest.mark.parametrize("options", ["n_threads=4", "n_threads=1, streaming=Streaming(io_threads=4)"])
def test_no_thread_can_be_started(tmp_path: Path, options: str) -> None:
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe", template=None)
    lines = without_threads(f"tell({options})\ntell(n_threads=1)\n", path)
    assert lines[0].startswith("EngineMemoryError cannot start 4 threads"), lines
    assert lines[1] == "decided 267"


def test_no_thread_can_be_started_for_a_template_or_a_long_run(tmp_path: Path) -> None:
    """Its template is not taken for a broken one, without which a model opens all the same."""
    code = """
tell(n_threads=1)
resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
with Engine.open(path, n_threads=1) as engine:
    long = engine.tokenize("x" * 5000)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1000))
    try:
        engine.tokenize("x" * 5000)
    except EngineMemoryError as error:
        print(error)
    print(engine.info.has_template, engine.tokenize("x" * 4000) == long[:4000])
    resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
    print(engine.tokenize("x" * 5000) == long)
"""
    lines = without_threads(code, tiny.write(tmp_path / "m.gguf"))
    assert lines[0].startswith("EngineMemoryError cannot have a stack of"), lines
    assert lines[1].startswith("cannot have a stack of 10 MiB"), lines
    assert lines[2:] == ["True True", "True"]


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "secret.gguf")
    path.chmod(0)
    (line,) = run_python("if os.geteuid() == 0: os.seteuid(64998)\ntell()\n", path)
    assert line.startswith("ModelError") and "Permission denied" in line and "secret.gguf" in line


NO_FILES = """
import signal
from bmoe_native import Streaming
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores: a write would be an error that may go unnoticed
"""


def test_nothing_is_written_to_any_file(tmp_path: Path) -> None:
    """So a full disk or one that is read-only is all the same: here no process may make a file of a byte."""
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
    path.chmod(0o444)
    # stdout is a pipe, which that limit is not for
    assert run_python(NO_FILES + "tell()\ntell(streaming=Streaming())\n", path) == ["decided 267"] * 2
