"""Records appended to a file."""

from collections.abc import Callable
from pathlib import Path

from bmoe.lines_file import LinesFile
from bmoe.probe.record import LINE_START, Record, line


class ProbeFile(LinesFile):
    """A line per record, in one write.

    Raises: Refused, as LinesFile.
    """

    def __init__(
        self, path: Path, *, flag: str = "--decide-probe", note: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(path, begins=LINE_START, flag=flag, note=note)

    def write(self, record: Record) -> None:
        """What cannot be written ends the file, and is said; no more than that."""
        self.append(line(record))
