"""What is read back of files and lines, under atheris: probe.py ARGUMENTS-OF-LIBFUZZER.

A byte that chooses the reader, then its bytes. What a reader does not take it refuses, by Refused and nothing else, and
what it takes survives being written and read again.
"""

import io
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import atheris

# The loader of an editable install would hide the bytecode from atheris; PYTHONPATH leads to the same files.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
with atheris.instrument_imports(include=["bmoe"]):
    from rich.console import Console

    from bmoe import protocol
    from bmoe.cli import probe_view
    from bmoe.csv_file import CsvFile
    from bmoe.decide import DecideRequest, Refused
    from bmoe.probe import ProbeFile, read
    from bmoe.probe.reader import parse
    from bmoe.probe.record import LINE_START, line
    from bmoe.probe.summary import Summary
    from bmoe.records import asked, read_object, request_id
    from bmoe.route_trace import COLUMNS

FOLDER = Path(tempfile.mkdtemp(prefix="bmoe-fuzz-"))
FILE = FOLDER / "input"


def probe_file(data: bytes) -> None:
    """As bmoe probe --from shows it."""
    FILE.write_bytes(data)
    total = Summary()
    console = Console(file=io.StringIO(), width=80)
    try:
        for record in read(FILE):
            text = line(record)
            assert line(parse(text)) == text
            came = total.add(record)
            console.print(probe_view.strip(record, came, "1", None, ascii_only=False, width=80))
            if came is not None:
                console.print(probe_view.by_layer(record, came, None))
    except Refused:
        pass
    console.print(probe_view.summary(total))


def batch_line(data: bytes) -> None:
    def letter(question: Any, options: Any, **common: Any) -> DecideRequest:
        return DecideRequest(prefix=question, suffix="", choices=options, **common)

    try:
        fields = read_object(data)
        request_id(fields)
        asked(fields, letter, system="s")
    except Refused:
        pass


def session_line(data: bytes) -> None:
    parsed = protocol.parse(data)
    protocol.held_bytes(parsed.command)
    if isinstance(parsed.command, protocol.Request):
        protocol.begin(parsed.command.id).decode("ascii")


def file_to_append_to(data: bytes) -> None:
    for kind in ("probe", "csv"):
        FILE.write_bytes(data)
        try:
            file = ProbeFile(FILE) if kind == "probe" else CsvFile(FILE, COLUMNS, flag="--f", note=lambda text: None)
        except Refused:
            assert FILE.read_bytes() == data
            continue
        file.close()
        left = FILE.read_bytes()
        assert left == b"" or left.endswith(b"\n")
        header = ",".join(COLUMNS).encode() + b"\n"
        assert data.startswith(left) or (kind == "csv" and left == header)
        assert kind == "csv" or left == b"" or left.startswith(LINE_START)


READERS = (probe_file, batch_line, session_line, file_to_append_to)


def one_input(data: bytes) -> None:
    if data:
        READERS[data[0] % len(READERS)](data[1:])


if __name__ == "__main__":
    warnings.simplefilter("error")
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
