"""The page cache, emptied as far as this process may."""

import os
from collections.abc import Sequence
from pathlib import Path

from bmoe.decide import Refused

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def drop_caches(file: Path = DROP_CACHES) -> None:
    """Have the system forget what it has read of files.

    Raises: Refused, for who may not.
    """
    try:
        _drop_all(file)
    except OSError as error:
        raise Refused(
            f"--drop-caches: only root may empty the page cache, and here it is refused ({error.strerror}). "
            "Leave it out: reads of experts go past the page cache"
        ) from error


def forget(paths: Sequence[Path], file: Path = DROP_CACHES) -> str:
    """Have the system forget these files, or all files where it may be asked to; which of the two it was.

    Raises: OSError, for a file that cannot be read.
    """
    try:
        _drop_all(file)
        return "drop_caches"
    except OSError:
        for path in paths:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(opened)
        return "fadvise"


def _drop_all(file: Path) -> None:
    os.sync()
    file.write_text("3\n")
