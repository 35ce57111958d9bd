"""Many decisions from one file into another, such that a run that was killed can go on."""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bmoe.decide import BadLogits, DecideRequest, DecideResult, Refused
from bmoe.records import Asked, Letter, asked, read_object, request_id, result_record

Decide = Callable[[DecideRequest], DecideResult]
Ask = Callable[[dict[str, Any]], Asked]
HASH_DIGITS = 16


class BatchError(RuntimeError):
    """The results cannot be written; what was written before is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch."""

    number: int  # in the file, from 1
    text: bytes
    request_hash: str  # of the text and of what else decides the answer


@dataclass(slots=True, kw_only=True)
class Tally:
    """How a batch went; resumed counts what an earlier run had answered, refusals included."""

    n_requests: int
    n_resumed: int = 0
    n_decided: int = 0
    n_refused: int = 0


def read_lines(data: bytes, settings: dict[str, Any]) -> list[Line]:
    """The requests in a file's bytes: every line that is not blank. settings are what else decides an answer."""
    salt = json.dumps(settings, sort_keys=True).encode() + b"\n"
    lines = []
    for number, text in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        text = text.strip(b" \t\r")
        if text:
            digest = hashlib.sha256(salt + text).hexdigest()[:HASH_DIGITS]
            lines.append(Line(number=number, text=text, request_hash=digest))
    return lines


@contextmanager
def results_file(path: Path, source: Path) -> Iterator[int]:
    """The descriptor to append results to, held by this process alone.

    Raises: Refused, where it is the file of requests or another process writes it; OSError.
    """
    if path.exists() and source.exists() and path.samefile(source):
        raise Refused(f"--out {path} is the file of requests: it would be overwritten")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        if _is_regular(descriptor):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Refused(f"another process is writing {path}") from error
        yield descriptor
    finally:
        os.close(descriptor)


def resume(descriptor: int, path: Path, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The records that an earlier run left whole, checked to be of these requests; a torn last line is cut off.

    Raises: Refused, where the file holds something else.
    """
    if not _is_regular(descriptor):
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for index, text in enumerate(whole.split(b"\n")[:-1]):
        record = _record(text)
        if index >= len(lines) or record.get("request_hash") != lines[index].request_hash:
            raise Refused(
                f"line {index + 1} of {path} is no result of request {index + 1} with this model and these settings: "
                "give another --out, or --restart to write it anew"
            )
        records.append(record)
    os.ftruncate(descriptor, len(whole))
    return records


def clear(descriptor: int) -> None:
    """Let go of the results of an earlier run.

    Raises: BatchError.
    """
    try:
        if _is_regular(descriptor):
            os.ftruncate(descriptor, 0)
    except OSError as error:
        raise BatchError(f"cannot clear the earlier results: {error.strerror}") from error


def counted(lines: Sequence[Line], done: Sequence[dict[str, Any]]) -> Tally:
    """How a batch stands that an earlier run has brought this far."""
    n_refused = sum("error" in record for record in done)
    return Tally(n_requests=len(lines), n_resumed=len(done), n_decided=len(done) - n_refused, n_refused=n_refused)


def run(
    lines: Sequence[Line],
    done: Sequence[dict[str, Any]],
    descriptor: int,
    *,
    decide: Decide,
    letter: Letter,
    template: bool = True,
    system: str | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Tally:
    """Answer what is not answered yet, in order, each result on the disk before the next request.

    template is for lines that do not say; system is what the session gives them, and no raw line can have it.

    Raises: BatchError; what the engine raises.
    """
    tally = counted(lines, done)
    ask = partial(asked, letter=letter, template=template, system=system)
    for index in range(len(done), len(lines)):
        record = _answer(index, lines[index], ask, decide)
        _write_line(descriptor, record)
        tally.n_refused += "error" in record
        tally.n_decided += "error" not in record
        on_record(record)
    return tally


def _answer(index: int, line: Line, ask: Ask, decide: Decide) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, "line": line.number, "request_hash": line.request_hash}
    try:
        fields = read_object(line.text)
        if "id" in fields:
            record["id"] = request_id(fields)
        asked_for = ask(fields)
        result = decide(asked_for.request)
    except (Refused, BadLogits) as error:
        # Broken logits are this request's too: the same line would break them again, and the session goes on.
        return record | {"error": str(error)}
    return record | result_record(result, asked_for.options)


def _write_line(descriptor: int, record: dict[str, Any]) -> None:
    data = memoryview(json.dumps(record, allow_nan=False).encode("ascii") + b"\n")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise BatchError(
            f"cannot write result {record['index'] + 1}: {error.strerror}; those before it are whole, and the same "
            "command goes on from there"
        ) from error


def _record(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
