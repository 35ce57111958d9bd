"""Records made by hand."""

from typing import Any

import numpy as np

from bmoe.probe import Record
from bmoe.probe.record import Routed


def routed(cnt: Any, n_used: int = 1, expert_mib: float = 1.0, wsum: Any = None) -> Routed:
    """Of layers that are lists of counts; [] is a layer without routed experts."""
    width = max(map(len, cnt))
    counts = np.array([[*row, *[0] * (width - len(row))] for row in cnt], np.int64)
    n_expert = np.array([len(row) for row in cnt], np.int64)
    return Routed(
        n_expert=n_expert,
        nu=np.where(n_expert > 0, n_used, 0),
        cnt=counts,
        wsum=np.array(counts / n_used if wsum is None else wsum, np.float32),
        expert_mib=np.where(n_expert > 0, expert_mib, 0.0),
    )


def record(lens: Any = None, *, routed: Routed | None = None, seq: int = 1, **fields: Any) -> Record:
    """With the answer that its lens ends with."""
    rows = None if lens is None else np.array(lens, np.float32)
    n_choices = 2 if rows is None else rows.shape[1]
    values: dict[str, Any] = {
        "n_tokens": 10,
        "n_prefilled": 10,
        "n_reused": 0,
        "prefill_s": 0.5,
        "choices": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:n_choices]),
        "best": 0 if rows is None else int(np.nanargmax(rows[-1])),
        "logp": np.linspace(-0.5, -2.0, n_choices),
        "lens_why": "" if rows is not None else "none was made",
    }
    return Record(seq=seq, lens=rows, routed=routed, **{**values, **fields})


def random_record(seed: int = 0, *, n_layer: int = 24, n_choices: int = 2, n_expert: int = 8, **fields: Any) -> Record:
    """Of a model whose first layer routes nothing and whose last routes one token."""
    random = np.random.default_rng(seed)
    lens = np.cumsum(random.normal(0, 0.5, (n_layer, n_choices)), axis=0)
    if not n_expert:
        return record(lens, **fields)
    hot = np.random.default_rng(99).random((n_layer, n_expert)) ** 3
    hot /= hot.sum(axis=1, keepdims=True)
    cnt: list[list[int]] = [[]]
    for layer in range(1, n_layer):
        cnt.append(random.multinomial(20 if layer < n_layer - 1 else 1, hot[layer]).tolist())
    return record(lens, routed=routed(cnt), **fields)
