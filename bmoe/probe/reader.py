"""A file of the probe as records, of numpy arrays. What is not understood is refused."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bmoe.decide import Refused
from bmoe.decide.types import checked_texts
from bmoe.probe.record import KEYS, VERSION, Record, Routed
from bmoe.records import read_object

_MOST_INT = 2**53
_MOST_FLOAT = float(np.finfo(np.float32).max)


def read(path: Path) -> Iterator[Record]:
    """The decisions of a file in order. A last line without an end, as a full disk leaves it, is none.

    Raises: OSError; Refused, naming the line, for what is no record of this version.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse(line)
            except Refused as error:
                raise Refused(f"line {number} of {path} is no record of the probe: {error}") from error


def parse(line: bytes) -> Record:
    """One line.

    Raises: Refused.
    """
    fields = read_object(line)
    if (version := fields.get("v")) != VERSION or isinstance(version, bool):
        raise Refused(f"its version v is {version!r}, and {VERSION} is what can be read")
    if set(fields) != set(KEYS):
        raise Refused(f"key {min(set(fields) ^ set(KEYS))!r} is {'missing' if set(KEYS) - set(fields) else 'unknown'}")
    choices = checked_texts("choices", fields["choices"])
    n_tokens = _whole("n_tokens", fields["n_tokens"])
    lens = _lens(fields, len(choices))
    routed = _routed(fields)
    if lens is not None and routed is not None and len(lens) != len(routed.nu):
        raise Refused(f"lens has {len(lens)} layers and cnt {len(routed.nu)}")
    return Record(
        seq=_whole("seq", fields["seq"]),
        n_tokens=n_tokens,
        n_prefilled=_whole("n_prefilled", fields["n_prefilled"], most=n_tokens),
        n_reused=_whole("n_reused", fields["n_reused"], most=n_tokens),
        prefill_s=_number("prefill_s", fields["prefill_s"]),
        choices=choices,
        best=_whole("best", fields["best"], most=len(choices) - 1),
        logp=np.array(_row("logp", fields["logp"], _or(_number, -np.inf), len(choices)), np.float64),
        lens=lens,
        lens_why=fields["lens_why"] or "",
        routed=routed,
    )


def _lens(fields: dict[str, Any], n_choices: int) -> Any:
    lens, why = fields["lens"], fields["lens_why"]
    if not (lens is None and isinstance(why, str) and why) and not (lens is not None and why is None):
        raise Refused("lens is a list and lens_why null, or lens null and lens_why a text")
    if lens is None:
        return None
    rows = [_row("lens", row, _or(_number, np.nan), n_choices) for row in _list("lens", lens)]
    if not rows:
        raise Refused("lens has no layers")
    return np.array(rows, np.float32)


def _routed(fields: dict[str, Any]) -> Routed | None:
    keys = ("cnt", "wsum", "nu", "expert_mib")
    if all(fields[key] is None for key in keys):
        return None
    nu = [_whole("nu", value) for value in _list("nu", fields["nu"])]
    expert_mib = _row("expert_mib", fields["expert_mib"], _number, len(nu))
    cnt = [[_whole("cnt", value) for value in _list("cnt", row)] for row in _list("cnt", fields["cnt"])]
    n_expert = [len(row) for row in cnt]
    if len(cnt) != len(nu) or not max(n_expert, default=0):
        raise Refused(f"cnt has {len(cnt)} layers and nu {len(nu)}" if len(cnt) != len(nu) else "cnt has no experts")
    given = _list("wsum", fields["wsum"])
    if len(given) != len(cnt):
        raise Refused(f"cnt has {len(cnt)} layers and wsum {len(given)}")
    wsum = [_row("wsum", row, _or(_number, np.nan), n) for row, n in zip(given, n_expert, strict=True)]
    for layer, (row, n_used, n) in enumerate(zip(cnt, nu, n_expert, strict=True)):
        if n_used > n or (n_used == 0) != (n == 0) or (n_used and sum(row) % n_used):
            raise Refused(f"cnt of layer {layer} sums to {sum(row)} over {n} experts, of which a token has {n_used}")
    return Routed(
        n_expert=np.array(n_expert, np.int64),
        nu=np.array(nu, np.int64),
        cnt=np.array(_padded(cnt, max(n_expert)), np.int64),
        wsum=np.array(_padded(wsum, max(n_expert)), np.float32),
        expert_mib=np.array(expert_mib, np.float64),
    )


def _padded(rows: Sequence[list[Any]], width: int) -> list[list[Any]]:
    return [row + [0] * (width - len(row)) for row in rows]


def _list(key: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{key} is no list")
    return value


def _row(key: str, value: object, read_one: Callable[[str, object], float], length: int) -> list[float]:
    row = _list(key, value)
    if len(row) != length:
        raise Refused(f"{key} has a row of {len(row)}, where {length} belong")
    return [read_one(key, item) for item in row]


def _whole(key: str, value: object, most: int = _MOST_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Refused(f"{key} is {value!r}, and no whole number from 0 to {most}")
    return value


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_FLOAT:
        raise Refused(f"{key} is {value!r}, and no number of its range")
    return float(value)


def _or(read_one: Callable[[str, object], float], missing: float) -> Callable[[str, object], float]:
    """What null stands for."""
    return lambda key, value: missing if value is None else read_one(key, value)
