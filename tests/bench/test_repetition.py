"""A process of its own that decides twice: what it is given, what it tells, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bmoe.bench import repetition as module
from bmoe.bench.repetition import Job, Unfinished, repetition
from bmoe_native.types import Streaming

OPTIONS = {"n_threads": 1, "n_ubatch": 0, "n_ctx": 0, "n_expert_used": 0}


def job(path: Path, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "path": path,
        "streaming": Streaming(cache_bytes=2**20),
        "repack": True,
        "options": OPTIONS,
        "first": list(range(20)),
        "second": list(range(20, 40)),
    }
    return Job(**{**values, **changes})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    processes = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(module.subprocess, "Popen", noted)
    return processes


class TestJob:
    @pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=5, direct=False)])
    def test_it_arrives_as_it_was(self, streaming: Streaming | None) -> None:
        sent = job(Path(os.fsdecode(b"/a\nb\xff.gguf")), streaming=streaming)
        line = sent.line()
        assert line.count(b"\n") == 1
        assert Job.from_line(line) == sent


class TestRepetition:
    def test_what_it_tells_of_a_streamed_model(self, moe: Path) -> None:
        one = repetition(job(moe))
        times = (one.imports_s, one.open_s, one.decision_s, one.warm_s, one.cpu_s)
        assert all(value > 0 for value in times)
        assert one.answer_s == pytest.approx(one.imports_s + one.open_s + one.decision_s)
        assert one.answer_without_imports_s == pytest.approx(one.open_s + one.decision_s)
        assert one.cache_mib == 1
        assert one.read_mib > 0

    def test_what_it_tells_of_a_mapped_one(self, moe: Path) -> None:
        one = repetition(job(moe, streaming=None, repack=False))
        assert (one.cache_mib, one.read_mib) == (0, 0)
        assert one.warm_s > 0

    def test_why_there_was_no_answer(self, tmp_path: Path, moe: Path) -> None:
        with pytest.raises(Unfinished, match=r"gone\.gguf"):
            repetition(job(tmp_path / "gone.gguf"))
        with pytest.raises(Unfinished, match="1000000 experts per token"):
            repetition(job(moe, options={**OPTIONS, "n_expert_used": 10**6}))

    def test_a_process_that_is_killed(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SCRIPT", "import os; os.kill(os.getpid(), 9)  # {path}")
        with pytest.raises(Unfinished, match="killed by signal 9, as when memory runs out"):
            repetition(job(moe))


class TestEnd:
    def test_of_an_interrupted_one_nothing_is_left(
        self, moe: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
    ) -> None:
        monkeypatch.setattr(module, "_SCRIPT", "import time; time.sleep(100)  # {path}")
        main = threading.get_ident()

        def interrupt() -> None:
            while not started:
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)

        presser = threading.Thread(target=interrupt)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            repetition(job(moe))
        presser.join()
        (process,) = started
        assert process.returncode == -signal.SIGKILL

    def test_it_ends_with_the_one_that_started_it(self, moe: Path) -> None:
        """However that ends: its end of the pipe is closed by the system."""
        script = (
            "import threading; from bmoe.bench import repetition; "
            "repetition.Engine.open = lambda *a, **o: (print('opening', flush=True), threading.Event().wait()); "
            "repetition.main()"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(job(moe).line())
            child.stdin.flush()
            assert child.stdout.readline() == b"opening\n"
            assert child.poll() is None
            child.stdin.close()
            try:
                assert child.wait(timeout=30) == 0
            finally:
                child.kill()
