"""Decisions as pictures, with matplotlib, which is an optional extra."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.decide import Refused
from bmoe.probe.course import Agreement, course, shares
from bmoe.probe.hits import HitRates
from bmoe.probe.record import Float64Array, Record
from bmoe.probe.summary import CURVE_FRACTIONS, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DPI = 120
LABEL_CHARACTERS = 24
MOST_TICKS = 16
# Blue and vermilion of Okabe and Ito, which every kind of colour vision tells apart; the heat maps' scales do, too.
BLUE, VERMILION = "#0072B2", "#D55E00"
SCALE = "cividis"


def check() -> None:
    """Raises: Refused, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise Refused("pictures need matplotlib, the extra [plots]: pip install matplotlib") from error


class Album:
    """Pictures of decisions into folders, which are made where they are missing.

    Raises: Refused, without matplotlib; OSError.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        check()
        self._folders = folders
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)

    def lens(self, record: Record, name: str, labels: Sequence[str] | None = None) -> list[Path]:
        """What each layer would have answered; nothing where there is no lens. labels: in place of the choices."""
        return [] if record.lens is None else self._save(lens_figure(record, labels or record.choices), name)

    def summary(self, summary: Summary) -> list[Path]:
        """Of all decisions together: those pictures there is something for."""
        return [path for name, figure in _figures(summary) for path in self._save(figure, name)]

    def _save(self, figure: "Figure", name: str) -> list[Path]:
        paths = []
        for kind, folder in self._folders.items():
            path = folder / f"{name}.{kind}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing")  # boxes, then, for that script
                figure.savefig(path, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
            paths.append(path)
        return paths


def _figures(summary: Summary) -> Iterator[tuple[str, "Figure"]]:
    agreed, usage, rates = summary.agreement, summary.usage, summary.hit_rates(CURVE_FRACTIONS)
    if agreed is not None:
        yield "agreement", agreement_figure(agreed)
    if usage is not None:
        yield "experts", usage_figure(usage)
    if rates is not None:
        yield "hits", hits_figure(rates)


def lens_figure(record: Record, labels: Sequence[str]) -> "Figure":
    """Choices by layers, as shares of the choices' probability; a dot is a layer's answer. Only with a lens."""
    came, n_choices, n_layer = course(record), len(record.choices), record.n_layer
    assert came is not None
    figure, axes = _figure(width=4 + 0.12 * max(n_layer, 24), height=1.9 + 0.28 * max(n_choices, 3))
    image = axes.imshow(shares(record).T, aspect="auto", cmap=SCALE, vmin=0, vmax=1, interpolation="nearest")
    layers = [layer for layer, answer in enumerate(came.answers) if answer >= 0]
    axes.scatter(
        layers, [came.answers[layer] for layer in layers], s=16, color="white", edgecolor="black", linewidth=0.8
    )
    axes.axvline(came.stays_from - 0.5, color="white", linewidth=2.5)
    axes.axvline(came.stays_from - 0.5, color=VERMILION, linewidth=1.5, linestyle="--")
    axes.set_yticks(range(n_choices), [_label(text) for text in labels])
    for index, label in enumerate(axes.get_yticklabels()):
        label.set_parse_math(False)
        label.set_fontweight("bold" if index == record.best else "normal")
    _layers(axes, n_layer)
    axes.set_ylabel("choice; bold: the decision")
    axes.set_title(f"Dots: the layers' answers. The decision stays from layer {came.stays_from}", fontsize=10)
    figure.colorbar(image, ax=axes, label="share of the choices")
    return figure


def agreement_figure(agreed: Agreement) -> "Figure":
    """At how many decisions a layer's answer is the final one."""
    n_layer = len(agreed.n_agree)
    figure, axes = _figure(width=3 + 0.1 * max(n_layer, 24), height=3.6)
    axes.plot([100 * n / agreed.n_decisions for n in agreed.n_agree], color=BLUE, marker="o", markersize=3.5)
    _layers(axes, n_layer)
    _percent(axes, f"decisions (of {agreed.n_decisions})")
    axes.set_title("Decisions whose answer at a layer is the final one", fontsize=10)
    return figure


def usage_figure(usage: Float64Array) -> "Figure":
    """Layers by experts: each expert's share of its layer's routings."""
    n_layer, n_expert = usage.shape
    figure, axes = _figure(width=3 + 0.04 * max(n_expert, 100), height=2 + 0.055 * max(n_layer, 40))
    # The last layer routes few tokens, and its shares would leave no contrast to the others.
    most = float(np.nanpercentile(100 * usage, 99.5)) or None
    image = axes.imshow(100 * usage, aspect="auto", cmap=SCALE, vmin=0, vmax=most, interpolation="nearest")
    axes.set_facecolor("white")
    _whole_ticks(axes.set_yticks, n_layer)
    _whole_ticks(axes.set_xticks, n_expert)
    axes.set_ylabel("layer")
    axes.set_xlabel("expert")
    axes.set_title("Which experts the tokens were routed to; white: no routed experts", fontsize=10)
    figure.colorbar(image, ax=axes, label="% of the layer's routings", extend="max")
    return figure


def hits_figure(rates: HitRates) -> "Figure":
    """What caches of all sizes would have served."""
    figure, axes = _figure(width=6.4, height=4)
    axes.plot(rates.cache_mib, _percents(rates.fixed), color=VERMILION, linestyle="--", label="most asked for, fixed")
    axes.plot(rates.cache_mib, _percents(rates.lru), color=BLUE, label="last asked for (LRU), empty at first")
    axes.set_xlim(0, rates.all_mib)
    axes.set_xlabel(f"expert cache, MiB (all experts: {rates.all_mib:,.0f})")
    _percent(axes, "experts found in the cache")
    axes.legend(loc="lower right", fontsize=9)
    axes.set_title(f"{rates.n_asked:,} experts asked for, once per decision and layer", fontsize=10)
    return figure


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _layers(axes: "Axes", n_layer: int) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(-0.5, n_layer - 0.5)
    _whole_ticks(axes.set_xticks, n_layer)


def _whole_ticks(set_ticks: Callable[..., Any], n: int) -> None:
    """At most MOST_TICKS, at round numbers; the last one is always there."""
    step = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, n) if n / step <= MOST_TICKS)
    ticks = [tick for tick in range(0, n - 1, step) if n - 1 - tick > 0.6 * step]
    set_ticks([*ticks, n - 1])


def _percent(axes: "Axes", label: str) -> None:
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
    axes.set_ylabel(label)
    axes.grid(color="0.85")
    axes.set_axisbelow(True)


def _percents(shares: tuple[float, ...]) -> Float64Array:
    return 100 * np.asarray(shares, np.float64)


def _label(choice: str) -> str:
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in choice)
    quoted = f"'{text}'" if text != text.strip() else text
    return quoted if len(quoted) <= LABEL_CHARACTERS else quoted[: LABEL_CHARACTERS - 1] + "…"
