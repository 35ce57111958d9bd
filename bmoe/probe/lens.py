"""What each layer would have answered: its state, read through the model's own head."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from bmoe.probe.record import Float32Array
from bmoe_native.errors import EngineError

TOLERANCE = 1e-2  # of the last layer's lens from the decision's logits; kernels alone differ by less than 1e-3


class LensEngine(Protocol):
    """What a lens needs of an engine that has just computed a prompt."""

    def logits(self) -> Float32Array: ...
    def head_logits(self, states: Float32Array, tokens: Sequence[int]) -> Float32Array: ...


def lens(
    engine: LensEngine, states: Mapping[int, Float32Array], tokens: Sequence[int]
) -> tuple[Float32Array | None, str]:
    """Logits of tokens at the end of each layer; or None and why there are none, which is better than wrong ones.

    Shapes: states [n_embd] by layer, tokens [n] → [n_layer, n].
    """
    if not states:
        return None, "the layers' ends are unknown in this architecture"
    if sorted(states) != list(range(len(states))):
        missing = min(set(range(max(states))) - set(states))
        return None, f"the end of layer {missing} is unknown in this architecture"
    try:
        made = engine.head_logits(np.stack([states[layer] for layer in range(len(states))]), tokens)
        off = _distance(made[-1], engine.logits()[list(tokens)])
    except EngineError as error:
        return None, str(error)
    if not off <= TOLERANCE:
        return None, f"the last layer's lens would be {off:.3g} from the decision's logits"
    return made, ""


def _distance(a: Float32Array, b: Float32Array) -> float:
    differ = a != b  # equal infinities do not
    return float(np.abs(a[differ] - b[differ]).max(initial=0.0))
