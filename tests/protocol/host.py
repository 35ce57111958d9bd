"""A host of a real `bmoe session`: its process, its lines, its end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.protocol.fake import WAIT_S, Lines, encoded, finals

ROOT = Path(__file__).parents[2]
SESSION = (sys.executable, "-m", "bmoe.cli", "session")
ORIGINAL = (sys.executable, "-m", "bmoe.cli.original")
FLAGS = ("--decide", "-c", "8192", "--ubatch", "32", "-t", "1")
SLOW_TEXT = "x " * 3500


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the checkout found from anywhere."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


class Host:
    """A session and what it has written so far."""

    def __init__(self, *command: str, **options: Any) -> None:
        self.lines = Lines()
        self.process = subprocess.Popen(
            command,
            **{
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "env": environment(),
                "cwd": ROOT,
                **options,
            },
        )
        self._errors: list[bytes] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def send(self, *lines: bytes | str | dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(encoded(line) + b"\n" for line in lines))
        self.process.stdin.flush()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def finish(self) -> int:
        """End its input; its exit code."""
        self.end_input()
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(WAIT_S)
        for thread in self._threads:
            thread.join(WAIT_S)
        return code

    @property
    def parsed(self) -> list[tuple[str, dict[str, Any]]]:
        return self.lines.parsed()

    @property
    def finals(self) -> list[tuple[str, dict[str, Any]]]:
        return finals(self.parsed)

    @property
    def errors(self) -> str:
        return b"".join(self._errors).decode()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.write(line)

    def _read_errors(self) -> None:
        if self.process.stderr is not None:
            self._errors.extend(self.process.stderr)


@contextmanager
def hosted(*command: str, **options: Any) -> Iterator[Host]:
    """A host whose session is gone afterwards, whatever a test did."""
    host = Host(*command, **options)
    try:
        yield host
    finally:
        host.process.kill()
        host.wait()
        for stream in (host.process.stdin, host.process.stdout, host.process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def decide(request_id: Any, **fields: Any) -> dict[str, Any]:
    return {"cmd": "decide", "id": request_id, "prefix": "one two ", "suffix": "three", "choices": ["A", "B"], **fields}


def generate(request_id: Any, **fields: Any) -> dict[str, Any]:
    return {"cmd": "generate", "id": request_id, "prompt": "hello", "n_predict": 5, **fields}


def run(*command: str, data: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, input=data, capture_output=True, timeout=WAIT_S, env=environment(), cwd=ROOT, check=False, **options
    )


SLOW = decide("slow", prefix=SLOW_TEXT)


def begin_slowly(host: Host, n_begun: int = 1) -> None:
    """A long decision, some way into its prefill."""
    host.lines.wait_for("READY")
    host.send(SLOW)
    host.lines.wait_for("BEGIN", n_begun)
    time.sleep(0.3)
