"""What runs out for a device: everything is then left on the CPU, but where its own thread does not start."""

import os
from pathlib import Path

import pytest

from tests import tiny
from tests.bmoe_native.test_limits import NO_FILES, NO_THREADS, run_python
from tests.device.server import Server

TELL = """
from bmoe_native import Streaming
def told(device, **options):
    try:
        with Engine.open(path, n_ubatch=64, n_threads=1, prefill_device=device, **options) as engine:
            result = engine.prefill(list(range(64)))
            print("device" if result.dev_tokens == 64 else "CPU", engine.info.prefill_device_why)
    except EngineError as error:
        print(type(error).__name__, error)
"""


def test_no_descriptors_left_for_the_device(paths: dict[str, Path], server: Server) -> None:
    code = f"""{TELL}
held = Engine.open(path, prefill_device={server.name()!r}, n_threads=1)  # whose connection the others share
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(len(os.listdir("/proc/self/fd")))
for n_free in range(12):
    full = []
    try:
        while True: full.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
    for _ in range(n_free): os.close(full.pop())
    told({server.name()!r}, streaming=Streaming(cache_bytes=0))
    for number in full: os.close(number)
print(len(os.listdir("/proc/self/fd")))
"""
    before, *lines, after = run_python(code, paths["qwen3moe"])
    assert lines[0].startswith("ModelError") and "Too many open files" in lines[0]
    assert any(line.startswith("CPU") and "Too many open files" in line for line in lines), lines
    assert lines[-1] == "device "
    assert before == after


def test_no_thread_can_be_started_for_the_device(server: Server, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the limit of threads is per user, and only root can become one that has none")
    path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe", n_ctx_train=1024, template=None)
    code = f"""{TELL}
held = Engine.open(path, prefill_device={server.name()!r}, n_threads=1)  # whose connection the others share
{NO_THREADS}
n_threads = len(os.listdir("/proc/self/task"))
for n_more in range(5):
    resource.setrlimit(resource.RLIMIT_NPROC, (n_threads + n_more, 1000))
    told({server.name()!r}, prefill_loaders=3)
    while len(os.listdir("/proc/self/task")) > n_threads: pass
"""
    lines = run_python(code, path)
    assert lines[0].startswith("EngineMemoryError cannot start a thread for the device"), lines
    for line in lines[1:4]:
        assert line.startswith("CPU") and "cannot start 3 threads to load with" in line, lines
    assert lines[4] == "device "


def test_nothing_is_written_with_a_device(paths: dict[str, Path], server: Server) -> None:
    code = f"{TELL}{NO_FILES}told({server.name()!r})\n"
    assert run_python(code, paths["qwen3moe"]) == ["device "]
