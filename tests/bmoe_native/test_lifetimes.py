"""Engines end in every order, in every process and thread, with a named error and no noise."""

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bmoe_native import ArgumentError, BusyError, ClosedError, Engine, ModelError, TemplateError
from tests import tiny

LONG = [7] * 4000


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120, check=False
    )


def test_close_twice_and_use_after_close(tiny_path: Path) -> None:
    engine = Engine.open(tiny_path)
    engine.close()
    engine.close()
    for use in (engine.logits, engine.counters, engine.drop_state, engine.cancel, lambda: engine.prefill([1])):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_a_with_block_left_by_an_exception_closes(tiny_path: Path) -> None:
    with pytest.raises(KeyError), Engine.open(tiny_path) as engine:
        raise KeyError
    with pytest.raises(ClosedError):
        _ = engine.position


def held(name: str) -> list[str]:
    """What this process has open or mapped of a file of that name."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            links.append(os.readlink(link))
    return maps + [link for link in links if name in link]


def no_such_file(path: Path) -> None:
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        Engine.open(path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError, match="failing"):
        Engine.open(path)


def tensors_missing(path: Path) -> None:
    tiny.write(path, edit=lambda writer: writer.add_block_count(99))
    with pytest.raises(ModelError, match="cannot load"):
        Engine.open(path)


def template_that_is_none(path: Path) -> None:
    with pytest.raises(TemplateError):
        Engine.open(path, chat_template="{% for %}")


def context_too_large(path: Path) -> None:
    with pytest.raises(ArgumentError, match="4097"):
        Engine.open(path, n_ctx=4097)


def stopped_while_loading(path: Path) -> None:
    seen: list[list[str]] = []

    def stop(fraction: float) -> None:
        seen.append(held(path.name))
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Engine.open(path, on_progress=stop)
    assert seen[0], "the file was not even open, so nothing was there to be left"


@pytest.mark.parametrize(
    "fail",
    [no_such_file, cut_short, tensors_missing, template_that_is_none, context_too_large, stopped_while_loading],
)
def test_a_failed_open_leaves_nothing(fail: Callable[[Path], None], tmp_path: Path) -> None:
    """No descriptor and no mapping of the file, and not one descriptor more of anything."""
    Engine.open(tiny.write(tmp_path / "before.gguf")).close()  # what the first engine of a process opens for good
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        path = tiny.write(tmp_path / "failing.gguf", n_ctx_train=4096)
        fail(path)
        assert held(path.name) == []
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_closed_engine_leaves_nothing(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "closed.gguf")
    with Engine.open(path) as engine:
        engine.prefill([1, 2, 3])
        assert held(path.name)
    assert held(path.name) == []


def test_two_engines_of_one_file_are_independent(tiny_path: Path) -> None:
    with Engine.open(tiny_path) as a, Engine.open(tiny_path) as b:
        a.prefill([1, 2, 3])
        b.prefill([9])
        assert (a.position, b.position) == (3, 1)
        first = a.logits()
        b.close()
        np.testing.assert_array_equal(a.logits(), first)
        a.drop_state()
        a.prefill([9])
        assert not np.array_equal(a.logits(), first)


def test_forgotten_engines_are_closed(tiny_path: Path) -> None:
    engine = Engine.open(tiny_path)
    finalizer = engine._finalizer
    del engine
    gc.collect()
    assert not finalizer.alive


def test_exit_with_engines_open_is_quiet(tiny_path: Path) -> None:
    code = """
import sys, threading, time
from bmoe_native import Engine, EngineError
kept = [Engine.open(sys.argv[1]) for _ in range(3)]
kept[0].prefill([1, 2, 3])
def work():
    try:
        while True:
            kept[1].drop_state()
            kept[1].prefill([7] * 4000)
    except EngineError:
        pass
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    done = run_python(code, tiny_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(tiny_path: Path) -> None:
    code = """
import os, sys
from bmoe_native import Engine, ForkedError
engine = Engine.open(sys.argv[1], n_threads=2)
engine.prefill([1, 2, 3])
wanted = engine.logits()
child = os.fork()
if child == 0:
    for use in (engine.logits, lambda: engine.prefill([1]), engine.cancel):
        try:
            use()
        except ForkedError:
            continue
        os._exit(3)
    engine.close()
    with Engine.open(sys.argv[1], n_threads=2) as own:
        for _ in range(3):
            own.drop_state()
            own.prefill([1, 2, 3])
        os._exit(0 if (own.logits() == wanted).all() else 4)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
engine.prefill([4])
print(status, engine.position)
"""
    done = run_python(code, tiny_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 4\n", "")


def test_the_c_side_refuses_an_inherited_handle_too(tiny_path: Path) -> None:
    code = """
import os, sys
from bmoe_native import Engine
from bmoe_native._lib import lib
engine = Engine.open(sys.argv[1])
child = os.fork()
if child == 0:
    os._exit(0 if lib().bmoe_position(engine._handle) == lib().BMOE_E_CLOSED else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), engine.position)
"""
    assert run_python(code, tiny_path).stdout == "0 0\n"


def test_multiprocessing_by_fork_gives_an_error_at_once(tiny_path: Path) -> None:
    code = """
import multiprocessing, sys
from bmoe_native import Engine, ForkedError
engine = Engine.open(sys.argv[1])
def use(_):
    try:
        engine.prefill([1])
    except ForkedError as error:
        return str(error)
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(use, [0])[0])
"""
    assert "before a fork" in run_python(code, tiny_path).stdout


def test_an_engine_cannot_be_pickled(engine: Engine) -> None:
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(engine)


def test_a_second_thread_is_refused_not_raced(tiny_path: Path) -> None:
    with Engine.open(tiny_path, n_ubatch=16, n_threads=1) as engine:
        worker = threading.Thread(target=engine.prefill, args=(LONG,))
        worker.start()
        refused = 0
        while worker.is_alive() and not refused:
            try:
                engine.counters()
            except BusyError:
                refused += 1
        engine.cancel()
        worker.join()
    assert refused


def test_closing_under_a_running_prefill_stops_it_and_frees_all(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "closing.gguf", n_ctx_train=4096)
    engine = Engine.open(path, n_ubatch=512, n_threads=1)
    assert "closing.gguf" in Path("/proc/self/maps").read_text()
    outcome: list[object] = []

    def work() -> None:
        try:
            while True:
                engine.drop_state()
                engine.prefill(LONG)
        except (ClosedError, BusyError) as error:
            outcome.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.1)
    engine.close()
    assert "closing.gguf" not in Path("/proc/self/maps").read_text()
    worker.join(timeout=60)
    assert not worker.is_alive() and len(outcome) == 1


def test_importing_loads_no_library() -> None:
    code = "import bmoe_native, bmoe; print([line for line in open('/proc/self/maps') if 'libbmoe' in line])"
    assert run_python(code).stdout == "[]\n"


def test_nobodys_descriptors_are_touched(tiny_path: Path) -> None:
    code = """
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
from bmoe_native import Engine
with Engine.open(sys.argv[1]) as engine:
    engine.prefill([1, 2, 3])
    ok = engine.logits().shape == (267,)
os._exit(0 if ok and not os.path.exists('/proc/self/fd/2') else 5)
"""
    assert run_python(code, tiny_path).returncode == 0
