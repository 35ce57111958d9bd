"""What many decisions come to together."""

from collections.abc import Iterable, Sequence

import numpy as np

from bmoe.decide import Refused
from bmoe.probe.course import Agreement, Course, agreement, course
from bmoe.probe.hits import HitRates, Replay
from bmoe.probe.record import Float64Array, Record, Routed
from bmoe.probe.routing import LayerUse, layer_uses

CACHE_FRACTIONS = (0.05, 0.10, 0.20, 0.30, 0.40, 0.50, 0.60, 0.80, 1.0)
CURVE_FRACTIONS = tuple(step / 100 for step in range(101))


class Summary:
    """Takes records one by one, and lets go of them."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.n_decisions = 0
        self._courses: list[Course] = []
        self._total: Routed | None = None
        self._replay: Replay | None = None
        self._n_layer: int | None = None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> Course | None:
        """How it came about, None without a lens.

        Raises: Refused, for a decision of a model of another shape.
        """
        self._check(record)
        self.n_decisions += 1
        came = course(record)
        if came is not None:
            self._courses.append(came)
        if record.routed is not None:
            self._route(record.routed)
        return came

    @property
    def agreement(self) -> Agreement | None:
        return agreement(self._courses)

    @property
    def layer_uses(self) -> tuple[LayerUse, ...]:
        """Of layers that route; none for a model without routed experts."""
        return layer_uses(self._total.cnt, self._total.n_expert) if self._total else ()

    @property
    def usage(self) -> Float64Array | None:
        """Each expert's share of its layer's routings: [n_layer, n_expert], NaN where there is no such expert."""
        if self._total is None:
            return None
        cnt = self._total.cnt.astype(np.float64)
        made: Float64Array = cnt / np.maximum(cnt.sum(axis=1, keepdims=True), 1)
        made[np.arange(cnt.shape[1]) >= self._total.n_expert[:, None]] = np.nan
        return made

    def hit_rates(self, fractions: Sequence[float] = CACHE_FRACTIONS) -> HitRates | None:
        """Of caches of these fractions of all experts."""
        return self._replay.rates(fractions) if self._replay else None

    def _check(self, record: Record) -> None:
        if self._n_layer is None and record.n_layer:
            self._n_layer = record.n_layer
        if record.n_layer and record.n_layer != self._n_layer:
            raise Refused(f"decisions of models with {self._n_layer} and with {record.n_layer} layers do not add up")
        if (
            record.routed is not None
            and self._total is not None
            and not (
                np.array_equal(record.routed.n_expert, self._total.n_expert)
                and np.array_equal(record.routed.expert_mib, self._total.expert_mib)
            )
        ):
            raise Refused("decisions of models with other experts do not add up")

    def _route(self, routed: Routed) -> None:
        if self._total is None or self._replay is None:
            self._replay = Replay(routed.n_expert.tolist(), routed.expert_mib.tolist())
            self._total = Routed(
                n_expert=routed.n_expert,
                nu=routed.nu,
                cnt=np.zeros_like(routed.cnt),
                wsum=np.zeros_like(routed.wsum),
                expert_mib=routed.expert_mib,
            )
        self._total.cnt[:] += routed.cnt
        self._total.wsum[:] += routed.wsum
        self._replay.add(routed)
