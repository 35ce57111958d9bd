"""What the probe says of one decision, and that as a line of JSON."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

VERSION = 1
LINE_START = b'{"v":%d,"seq":' % VERSION
KEYS = (
    "v",
    "seq",
    "n_tokens",
    "n_prefilled",
    "n_reused",
    "prefill_s",
    "choices",
    "best",
    "logp",
    "lens",
    "lens_why",
    "cnt",
    "wsum",
    "nu",
    "expert_mib",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """Where the tokens that a decision prefilled were routed to.

    Shapes: [n_layer, n_expert] and [n_layer]; a layer with fewer experts, or none, has zeros behind its own.
    """

    n_expert: Int64Array  # of each layer
    nu: Int64Array  # experts of a token; 0: the layer routes nothing
    cnt: Int64Array  # tokens that an expert computed
    wsum: Float32Array  # sum of the weights that they gave it
    expert_mib: Float64Array  # of one expert of the layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One decision. What was computed of it: n_prefilled of n_tokens; the others were restored."""

    seq: int
    n_tokens: int
    n_prefilled: int
    n_reused: int
    prefill_s: float
    choices: tuple[str, ...]
    best: int
    logp: Float64Array  # [n_choices], nats over the whole vocabulary; -inf where there is no mass
    lens: Float32Array | None  # [n_layer, n_choices], logits
    lens_why: str  # why there is none; empty where there is one
    routed: Routed | None  # None: the model has no routed experts

    @property
    def n_layer(self) -> int:
        """Layers that were heard of; 0: none."""
        if self.lens is not None:
            return len(self.lens)
        return len(self.routed.nu) if self.routed else 0


def described(record: Record) -> dict[str, Any]:
    """What a record says of the decision itself, as JSON has it."""
    return {
        "seq": record.seq,
        "n_tokens": record.n_tokens,
        "n_prefilled": record.n_prefilled,
        "n_reused": record.n_reused,
        "prefill_s": record.prefill_s,
        "choices": list(record.choices),
        "best": record.best,
        "logp": [finite(logp) for logp in record.logp.tolist()],
    }


def line(record: Record) -> bytes:
    """A record as it stands in a file, its line end included."""
    fields: dict[str, Any] = {
        "v": VERSION,
        **described(record),
        "lens": None if record.lens is None else [_short(row) for row in record.lens.tolist()],
        "lens_why": record.lens_why or None,
        "cnt": None,
        "wsum": None,
        "nu": None,
        "expert_mib": None,
    }
    if record.routed is not None:
        routed, own = record.routed, record.routed.n_expert.tolist()
        fields["cnt"] = [row[:n] for row, n in zip(routed.cnt.tolist(), own, strict=True)]
        fields["wsum"] = [_short(row[:n]) for row, n in zip(routed.wsum.tolist(), own, strict=True)]
        fields["nu"] = routed.nu.tolist()
        fields["expert_mib"] = routed.expert_mib.tolist()
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def _short(values: Iterable[float]) -> list[float | None]:
    """With the nine digits that read back as the same float32."""
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in values]
