"""Rows appended to a CSV file whose header is ours, and what becomes of a file that holds something else."""

import csv
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bmoe.decide import Refused


class CsvFile:
    """Open for appending; a torn last line, as a kill or a full disk leaves it, is cut off.

    Raises: Refused by the flag's name, where the file cannot be written or holds something else.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, flag: str, note: Callable[[str], None]) -> None:
        self._path = path
        self._flag = flag
        self._note = note
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Refused(f"{flag}: cannot write {path}: {error.strerror}") from error
        header = row(columns)
        try:
            is_new = self._is_new(descriptor, header)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        if is_new:
            self.write(header)

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        """Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, rows: bytes) -> None:
        """Whole rows in one call, so that nothing can come between; what cannot be written ends the file, no more."""
        if self._descriptor is None or not rows:
            return
        try:
            if os.write(self._descriptor, rows) == len(rows):
                return
            reason = "only a part of a row was written"
        except OSError as error:
            reason = error.strerror or str(error)
        self.close()
        self._note(f"{self._flag}: {self._path} ends here: {reason}")

    def _is_new(self, descriptor: int, header: bytes) -> bool:
        """Whether a header is to be written; one that is there must be ours.

        Raises: Refused.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{self._flag}: another process is writing {self._path}") from error
        size = os.fstat(descriptor).st_size
        found = os.pread(descriptor, len(header), 0)
        if header.startswith(found) and found != header:  # empty, or a header that was cut off
            os.ftruncate(descriptor, 0)
            return True
        if found != header:
            raise Refused(f"{self._flag}: {self._path} holds something else: give another file")
        os.ftruncate(descriptor, _end_of_last_line(descriptor, size))
        return False


def row(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("ascii")


def _end_of_last_line(descriptor: int, size: int) -> int:
    """Rows are short: the last line end is in the last few KiB, or the header's is the one."""
    start = max(0, size - 2**16)
    return start + os.pread(descriptor, size - start, start).rfind(b"\n") + 1
