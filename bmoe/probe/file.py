"""Records appended to a file, and what becomes of a file that holds something else."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from bmoe.decide import Refused
from bmoe.probe.record import LINE_START, Record, line

_BLOCK = 2**16


class ProbeFile:
    """A line per record, in one write; a torn last line, as a full disk leaves it, is cut off on opening.

    Raises: Refused by the flag's name, where the file cannot be written or holds something else.
    """

    def __init__(
        self, path: Path, *, flag: str = "--decide-probe", note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.path = path
        self._flag = flag
        self._note = note
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Refused(f"{flag}: cannot write {path}: {error.strerror}") from error
        try:
            self._claim(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def close(self) -> None:
        """Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "ProbeFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """What cannot be written ends the file, and is said; no more than that."""
        if self._descriptor is None:
            return
        data = line(record)
        try:
            if os.write(self._descriptor, data) == len(data):
                return
            reason = "only a part of a line was written"
        except OSError as error:
            reason = error.strerror or str(error)
        self.close()
        self._note(f"{self._flag}: {self.path} ends here: {reason}")

    def _claim(self, descriptor: int) -> None:
        """Make the file ours alone, and its end the end of a line.

        Raises: Refused.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{self._flag}: another process is writing {self.path}") from error
        found = os.pread(descriptor, len(LINE_START), 0)
        if not LINE_START.startswith(found):
            raise Refused(f"{self._flag}: {self.path} holds something else: give another file")
        os.ftruncate(descriptor, _end_of_last_line(descriptor))


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
