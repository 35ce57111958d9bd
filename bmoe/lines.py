"""Lines of a byte stream, none of them held beyond a bound."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

CHUNK_BYTES = 2**16
_BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """Bytes as they come, at most `size` of them and none at the end. A buffered stream would wait for them all."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was skipped: it had this many bytes."""

    n_bytes: int


def lines(source: Source, max_bytes: int) -> Iterator[bytes | Overlong]:
    """Lines without their ends, blank ones and a byte-order mark left out; the last one may have no end."""
    held = bytearray()
    n_skipped = 0  # bytes of an over-long line that were let go
    first = True
    while True:
        chunk = source.read(CHUNK_BYTES)
        pieces = chunk.split(b"\n")
        for index, piece in enumerate(pieces):
            is_whole = index < len(pieces) - 1 or not chunk
            if n_skipped or len(held) + len(piece) > max_bytes + len(b"\r"):
                n_skipped += len(held) + len(piece)
                held.clear()
            else:
                held += piece
            if not is_whole:
                continue
            line = _trimmed(bytes(held), first)
            if n_skipped or len(line) > max_bytes:
                yield Overlong(n_skipped or len(line))
            elif line.strip(b" \t"):
                yield line
            held.clear()
            n_skipped, first = 0, False
        if not chunk:
            return


def _trimmed(line: bytes, first: bool) -> bytes:
    return line.removeprefix(_BOM if first else b"").removesuffix(b"\r")
