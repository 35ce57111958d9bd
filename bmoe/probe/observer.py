"""What hooks tell during a decision, gathered into a record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bmoe.decide import DecideResult
from bmoe.probe.lens import LensEngine, lens
from bmoe.probe.record import Float32Array, Float64Array, Int64Array, Record, Routed
from bmoe_native.types import Routing

MIB = 2**20


class ProbedEngine(LensEngine, Protocol):
    """What the probe needs of an engine besides its hooks."""

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]: ...


@dataclass(slots=True)
class _Layer:
    """The routings of one layer so far."""

    cnt: Int64Array
    wsum: Float64Array
    n_used: int
    expert_mib: float


class Probe:
    """Gives on_record a record of each decision that was made. Given to Session.open(), for one session."""

    def __init__(self, on_record: Callable[[Record], None]) -> None:
        self.next_seq = 1  # of the next request; set by who also counts those that never reach a session
        self._on_record = on_record
        self._seq = 0
        self._listens = False
        self._states: dict[int, Float32Array] = {}
        self._layers: dict[int, _Layer] = {}

    def began(self) -> None:
        """A request is served from here on, of whatever kind."""
        self._seq = self.next_seq
        self.next_seq += 1

    def routed(self, routing: Routing) -> None:
        """A layer's choices for the tokens of one graph."""
        if not self._listens:
            return
        experts, n_expert = routing.experts.ravel(), routing.n_expert
        layer = self._layers.get(routing.layer)
        if layer is None:
            layer = _Layer(
                np.zeros(n_expert, np.int64), np.zeros(n_expert), routing.experts.shape[1], routing.expert_bytes / MIB
            )
            self._layers[routing.layer] = layer
        layer.cnt += np.bincount(experts, minlength=n_expert)
        layer.wsum += np.bincount(experts, routing.weights.ravel(), minlength=n_expert)

    def layer_ended(self, layer: int, state: Float32Array) -> None:
        """What a layer hands on for the last token of a prefill; a decision's last prefill is the one that counts."""
        if not self._listens:
            return
        if layer in self._states:
            self._states.clear()
        self._states[layer] = state

    def observe(self, engine: ProbedEngine, decide: Callable[[], DecideResult]) -> DecideResult:
        """Let a decision be made, and tell of it. Of one that is cancelled, or raises, nothing is told."""
        self._states.clear()
        self._layers.clear()
        self._listens = True
        try:
            result = decide()
        finally:
            self._listens = False
        if not result.cancelled:
            self._on_record(self._record(engine, result))
        return result

    def _record(self, engine: ProbedEngine, result: DecideResult) -> Record:
        tokens = [engine.text_tokens(choice, add_bos=False)[0] for choice in result.choices]
        made, why = lens(engine, self._states, tokens)
        return Record(
            seq=self._seq,
            n_tokens=result.n_tokens,
            n_prefilled=result.n_prefilled,
            n_reused=result.n_reused,
            prefill_s=result.prefill_s,
            choices=result.choices,
            best=result.best,
            logp=np.array(result.choice_logp, np.float64),
            lens=made,
            lens_why=why,
            routed=_routed(self._layers, n_layer=max([*self._states, *self._layers], default=-1) + 1),
        )


def _routed(layers: dict[int, _Layer], n_layer: int) -> Routed | None:
    if not layers:
        return None
    n_most = max(layer.cnt.size for layer in layers.values())
    routed = Routed(
        n_expert=np.zeros(n_layer, np.int64),
        nu=np.zeros(n_layer, np.int64),
        cnt=np.zeros((n_layer, n_most), np.int64),
        wsum=np.zeros((n_layer, n_most), np.float32),
        expert_mib=np.zeros(n_layer),
    )
    for index, layer in layers.items():
        n_expert = layer.cnt.size
        routed.n_expert[index] = n_expert
        routed.nu[index] = layer.n_used
        routed.cnt[index, :n_expert] = layer.cnt
        routed.wsum[index, :n_expert] = layer.wsum
        routed.expert_mib[index] = layer.expert_mib
    return routed
