"""stdout and stderr as the commands see them: which failures of theirs count."""

import os
from collections.abc import Callable
from typing import TextIO


class StdoutError(RuntimeError):
    """The answer could not be delivered."""


class _Stream:
    """A text stream whose failures are for _failed() to judge."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or _closed()
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._error is None:
            try:
                call()
            except OSError as error:
                self._error = error
                self._let_go()
        if self._error is not None:
            # Each time, since typer tries a stream with an empty text first and passes over what that raises.
            self._failed(self._error)

    def _let_go(self) -> None:
        # What is left in the buffer would be written at exit once more, and fail with an exit code of Python's own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def _failed(self, error: OSError) -> None:
        raise NotImplementedError


class Stdout(_Stream):
    """The answer: losing it is an error, unless whoever reads it has left."""

    def _failed(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise StdoutError(f"cannot write to stdout: {error.strerror or error}") from error


class Stderr(_Stream):
    """Progress and prose: no work stops for want of it."""

    def _failed(self, error: OSError) -> None:
        pass


def _closed() -> TextIO:
    """What stands for a stream that was closed before we began: every write fails, since it can only be read."""
    return os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
