"""A process of its own that opens a model and decides twice: what a comparison is made of."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmoe_native import Engine
from bmoe_native.types import Streaming

# The child imports what this process imports, wherever it was started.
_SCRIPT = "import sys; sys.path[:] = {path!r}; from bmoe.bench import repetition; repetition.main()"
_LIKELY_VICTIM = "1000"  # of the kernel, where memory runs out: this child, and no one else


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process does."""

    path: Path
    streaming: Streaming | None
    repack: bool
    options: dict[str, int]  # of Engine.open()
    first: list[int]  # tokens
    second: list[int]

    def line(self) -> bytes:
        return json.dumps({**dataclasses.asdict(self), "path": os.fsencode(self.path).hex()}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Job":
        values = json.loads(line)
        streaming = values.pop("streaming")
        path = Path(os.fsdecode(bytes.fromhex(values.pop("path"))))
        return cls(**values, path=path, streaming=Streaming(**streaming) if streaming else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Seconds of one process."""

    imports_s: float  # from its start to where all is imported
    open_s: float
    decision_s: float  # the first
    answer_s: float  # from its start to the first answer
    warm_s: float  # a second decision, of another text
    cpu_s: float  # of the two decisions
    n_major_faults: int  # in them
    cache_mib: float  # budget of experts; 0 where nothing streams
    read_mib: float  # of experts by the engine in them; none where they are mapped

    @property
    def answer_without_imports_s(self) -> float:
        return self.answer_s - self.imports_s


class Unfinished(Exception):
    """The process gave no answer; the text says why."""


def repetition(job: Job) -> Repetition:
    """One process from its start to its end. Nothing of it is left when this returns or raises.

    Raises: Unfinished.
    """
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()  # one clock for all processes
        child = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(job.line())
                child.stdin.flush()  # and left open: where this process ends, so does the child
            line = child.stdout.readline()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            status = child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        if not line:
            said.seek(0)
            raise Unfinished(_reason(status, said.read().decode(errors="replace")))
    return _repetition(began, json.loads(line))


def _repetition(began: float, told: dict[str, Any]) -> Repetition:
    at = told.pop("at")
    return Repetition(
        imports_s=at["imported"] - began,
        open_s=at["opened"] - at["imported"],
        decision_s=at["answered"] - at["opened"],
        answer_s=at["answered"] - began,
        warm_s=at["answered_again"] - at["asked_again"],
        **told,
    )


def _reason(status: int, said: str) -> str:
    if status < 0:
        return f"killed by signal {-status}" + (", as when memory runs out" if status == -9 else "")
    return (said.strip().splitlines() or [f"exit code {status}"])[-1]


def main() -> None:
    """The child: a job on stdin, what came of it on stdout."""
    at = {"imported": time.monotonic()}
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_LIKELY_VICTIM)
    job = Job.from_line(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    options: dict[str, Any] = job.options
    with Engine.open(job.path, streaming=job.streaming, repack=job.repack, **options) as engine:
        at["opened"] = time.monotonic()
        first = engine.prefill(job.first)
        engine.logits()
        at["answered"] = time.monotonic()
        at["asked_again"] = time.monotonic()
        engine.drop_state()
        second = engine.prefill(job.second)
        engine.logits()
        at["answered_again"] = time.monotonic()
        told = {
            "at": at,
            "cpu_s": first.prefill_cpu_s + second.prefill_cpu_s,
            "n_major_faults": first.n_major_faults + second.n_major_faults,
            "cache_mib": engine.info.cache_bytes / 2**20,
            "read_mib": (first.read_bytes + second.read_bytes) / 2**20,
        }
        # Before the model is closed, which takes its time, and within: who ends this process now has its answer.
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """The other end of stdin is closed where the parent has what it wants, and where it is gone."""
    while os.read(0, 1):
        pass
    os._exit(0)
