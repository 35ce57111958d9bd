"""Rows appended to a CSV file whose header is ours."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bmoe.lines_file import LinesFile


class CsvFile(LinesFile):
    """A file of these columns; the header is written where there is none yet.

    Raises: Refused, as LinesFile.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, flag: str, note: Callable[[str], None]) -> None:
        header = row(columns)
        super().__init__(path, begins=header, flag=flag, note=note)
        if self.is_new:
            self.append(header)


def row(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("ascii")
