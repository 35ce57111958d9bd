"""How concentrated routing is: which part of the experts does which part of the work."""

from dataclasses import dataclass

import numpy as np

from bmoe.probe.record import Int64Array

HOTTEST = (0.10, 0.25, 0.50)  # of a layer's experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """The experts of one layer over all decisions. Shares are 0..1."""

    layer: int
    n_expert: int
    n_routings: int  # tokens times experts of a token
    used: float  # share of the experts that computed anything
    hottest: tuple[float, ...]  # share of the routings that the hottest part of the experts covers, by HOTTEST


def layer_uses(cnt: Int64Array, n_expert: Int64Array) -> tuple[LayerUse, ...]:
    """Of the layers that route. The hottest tenth of 8 experts is one: parts are rounded up.

    Shapes: cnt [n_layer, n_expert], added up over decisions; n_expert [n_layer].
    """
    uses = []
    for layer, n in enumerate(n_expert.tolist()):
        if not n:
            continue
        counts = np.sort(cnt[layer, :n])[::-1]
        total = int(counts.sum())
        covered = [int(counts[: int(np.ceil(part * n - 1e-9))].sum()) for part in HOTTEST]
        uses.append(
            LayerUse(
                layer=layer,
                n_expert=n,
                n_routings=total,
                used=float((counts > 0).mean()),
                hottest=tuple(count / total if total else 0.0 for count in covered),
            )
        )
    return tuple(uses)
