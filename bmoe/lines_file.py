"""Lines appended to a file, whole, and what becomes of a file that holds something else."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bmoe.decide import Refused

_BLOCK = 2**16
_File = TypeVar("_File", bound="LinesFile")


class LinesFile:
    """Open for appending, ours alone; a torn last line, as a kill or a full disk leaves it, is cut off.

    begins is what a file of this kind begins with. Raises: Refused by the flag's name, where the file cannot be written
    or begins with something else.
    """

    def __init__(self, path: Path, *, begins: bytes, flag: str, note: Callable[[str], None]) -> None:
        self.path = path
        self._flag = flag
        self._note = note
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Refused(f"{flag}: cannot write {path}: {error.strerror}") from error
        try:
            self.is_new = self._claim(descriptor, begins)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        """Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, lines: bytes) -> None:
        """In one call, so that nothing can come between; what cannot be written ends the file, and is said; no more."""
        if self._descriptor is None or not lines:
            return
        try:
            if os.write(self._descriptor, lines) == len(lines):
                return
            reason = "only a part of a line was written"
        except OSError as error:
            reason = error.strerror or str(error)
        self.close()
        self._note(f"{self._flag}: {self.path} ends here: {reason}")

    def _claim(self, descriptor: int, begins: bytes) -> bool:
        """Whether nothing is in the file; else its end is made the end of a line.

        Raises: Refused.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{self._flag}: another process is writing {self.path}") from error
        found = os.pread(descriptor, len(begins), 0)
        if not begins.startswith(found):
            raise Refused(f"{self._flag}: {self.path} holds something else: give another file")
        os.ftruncate(descriptor, _end_of_last_line(descriptor) if found == begins else 0)
        return os.fstat(descriptor).st_size == 0


def _end_of_last_line(descriptor: int) -> int:
    """Lines can be long: looked for block by block from the end; 0 where there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
