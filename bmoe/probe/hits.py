"""What a cache of experts would have served, from which experts each decision asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bmoe.probe.record import Float64Array, Routed


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """By the cache's size. A hit: the expert was in memory when a decision first asked for it."""

    n_asked: int  # experts, once per decision and layer
    all_mib: float  # all experts of the model
    cache_mib: tuple[float, ...]
    lru: tuple[float, ...]  # 0..1: empty at first, it keeps what was asked for last
    fixed: tuple[float, ...]  # 0..1: from the start it holds what is asked for most often for its size


class Replay:
    """Decisions in their order, each after what those before it have left in a cache."""

    def __init__(self, n_expert: Sequence[int], expert_mib: Sequence[float]) -> None:
        self._starts = np.concatenate([[0], np.cumsum(n_expert)]).astype(np.intp)
        self._mib = np.repeat(np.asarray(expert_mib, np.float64), n_expert)
        self._asked = np.zeros(self._mib.size, np.int64)
        self._order = np.zeros(0, np.intp)  # experts that were asked for, the latest first
        self._depths: list[Float64Array] = []

    def add(self, routed: Routed) -> None:
        """A decision: its layers in order. Of a layer's experts those in memory are used before others are read."""
        for layer, n in enumerate(routed.n_expert.tolist()):
            asked = self._starts[layer] + np.flatnonzero(routed.cnt[layer, :n])
            self._asked[asked] += 1
            is_asked = np.zeros(self._mib.size, bool)
            is_asked[asked] = True
            again = is_asked[self._order]
            # An LRU cache holds an expert if it holds all that was asked for since, and it: the depth is their size.
            self._depths.append(np.cumsum(self._mib[self._order])[again])
            is_asked[self._order] = False
            self._order = np.concatenate(
                [np.flatnonzero(is_asked)[::-1], self._order[again][::-1], self._order[~again]]
            )

    def rates(self, fractions: Sequence[float]) -> HitRates | None:
        """For caches of these fractions of all experts; None where nothing was asked for."""
        n_asked = int(self._asked.sum())
        if not n_asked:
            return None
        all_mib = float(self._mib.sum())
        sizes = np.asarray(fractions, np.float64) * all_mib
        room = sizes * (1 + 1e-12)  # sums round
        depths = np.sort(np.concatenate(self._depths))
        often_first = np.argsort(-self._asked / np.maximum(self._mib, 1e-300), kind="stable")
        filled = np.cumsum(self._mib[often_first])
        served = np.concatenate([[0], np.cumsum(self._asked[often_first])])
        return HitRates(
            n_asked=n_asked,
            all_mib=all_mib,
            cache_mib=tuple(sizes.tolist()),
            lru=tuple((np.searchsorted(depths, room, side="right") / n_asked).tolist()),
            fixed=tuple((served[np.searchsorted(filled, room, side="right")] / n_asked).tolist()),
        )
