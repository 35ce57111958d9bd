"""Where in a model's files its experts lie, cut as the engine reads them. No call of bmoe.h tells."""

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_REQUEST_BYTES = 4 << 20  # of one read of the engine's
_SHARD = re.compile(r"-00001-of-(\d{5})\.gguf$")
_EXPERTS = re.compile(rb"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's types of fixed size
_UINT32, _STRING, _ARRAY = 4, 8, 9


@dataclass(frozen=True, slots=True)
class Request:
    """A range of a file that the engine reads at once."""

    path: Path
    offset: int
    n_bytes: int


def shards(path: Path, n_shards: int) -> list[Path]:
    """All files of a model, by the name of its first."""
    if n_shards < 2 or not _SHARD.search(path.name):
        return [path]
    return [
        path.with_name(_SHARD.sub(f"-{number:05}-of-{n_shards:05}.gguf", path.name))
        for number in range(1, n_shards + 1)
    ]


def expert_requests(paths: Sequence[Path]) -> list[Request]:
    """One for each expert's part of each tensor, or more where that is larger than a request."""
    found = []
    for path in paths:
        for offset, n_bytes, n_expert in _expert_tensors(path):
            part = n_bytes // n_expert
            for at in range(offset, offset + part * n_expert, part):
                for skipped in range(0, part, MAX_REQUEST_BYTES):
                    found.append(Request(path, at + skipped, min(MAX_REQUEST_BYTES, part - skipped)))
    return found


def _expert_tensors(path: Path) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, experts) of each tensor of routed experts. The engine has opened the file: it is a sound one.

    Source: the GGUF specification, docs/gguf.md of ggml.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = 8

        def number(layout: str) -> int:
            nonlocal at
            value: int = struct.unpack_from(f"<{layout}", data, at)[0]
            at += struct.calcsize(layout)
            return value

        def text() -> bytes:
            nonlocal at
            size = number("Q")
            at += size
            return data[at - size : at]

        def skip(kind: int, count: int = 1) -> None:
            nonlocal at
            if kind == _ARRAY:
                skip(number("I"), number("Q"))
            elif kind == _STRING:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", data, at)[0]
            else:
                at += count * _VALUE_BYTES[kind]

        n_tensors, n_values = number("Q"), number("Q")
        alignment = 32
        for _ in range(n_values):
            key, kind = text(), number("I")
            if key == b"general.alignment" and kind == _UINT32:
                alignment = number("I")
            else:
                skip(kind)
        tensors = []
        for _ in range(n_tensors):
            name = text()
            sizes = [number("Q") for _ in range(number("I"))]
            number("I")
            tensors.append((number("Q"), name, sizes))
        begin = -(-at // alignment) * alignment
        ends = [*sorted(offset for offset, _, _ in tensors)[1:], len(data) - begin]
        for (offset, name, sizes), end in zip(sorted(tensors), ends, strict=True):
            if _EXPERTS.fullmatch(name):
                yield begin + offset, end - offset, sizes[2]
