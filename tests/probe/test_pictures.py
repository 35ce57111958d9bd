"""Pictures: which are drawn, what their axes say, and that labels fit."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bmoe import Refused
from bmoe.probe import Record, pictures
from bmoe.probe.course import course
from bmoe.probe.summary import CURVE_FRACTIONS, Summary
from tests.probe.made import random_record, record

SHAPES = [(24, 2, 8), (24, 20, 32), (94, 2, 128), (94, 20, 128)]
NAMES = ("$x^{$ is a formula with a long name", " Paris", "日本", "a\nb", "")


def of(n_layer: int, n_choices: int, n_expert: int, seed: int = 0) -> Record:
    choices = tuple([*NAMES, *(f"choice {index}" for index in range(n_choices))][:n_choices])
    return random_record(seed, n_layer=n_layer, n_choices=n_choices, n_expert=n_expert, choices=choices)


def summary(shape: tuple[int, int, int]) -> Summary:
    return Summary(of(*shape, seed=seed) for seed in range(4))


def axes_of(figure: Any) -> Any:
    """The main axes, drawn."""
    FigureCanvasAgg(figure).draw()
    return figure.axes[0]


def assert_apart(labels: Any, figure: Any) -> None:
    """None of them touches the next one, nor the edge."""
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert len(boxes) > 1
    assert not [1 for one, other in pairwise(boxes) if one.overlaps(other)]
    edges = figure.bbox
    assert all(edges.x0 <= box.x0 and box.x1 <= edges.x1 and edges.y0 <= box.y0 and box.y1 <= edges.y1 for box in boxes)


@pytest.mark.parametrize("shape", SHAPES)
class TestShapes:
    @pytest.mark.filterwarnings("ignore:Glyph .* missing")
    def test_the_lens(self, shape: tuple[int, int, int]) -> None:
        made = of(*shape)
        came = course(made)
        assert came is not None
        figure = pictures.lens_figure(made, made.choices)
        axes = axes_of(figure)
        assert axes.get_xlabel() == "layer"
        assert axes.get_ylabel() == "choice; bold: the decision"
        assert f"layer {came.stays_from}" in axes.get_title()
        assert axes.images[0].get_array().shape == (shape[1], shape[0])
        assert_apart(axes.get_xticklabels(), figure)
        labels = axes.get_yticklabels()
        assert_apart(labels, figure)
        assert len(labels) == shape[1]
        assert [label.get_fontweight() == "bold" for label in labels].index(True) == made.best
        assert labels[0].get_text() == "$x^{$ is a formula with…"
        dots = axes.collections[0].get_offsets()
        assert [int(y) for _, y in dots] == list(came.answers)

    def test_the_summary(self, shape: tuple[int, int, int]) -> None:
        total = summary(shape)
        agreed, usage, rates = total.agreement, total.usage, total.hit_rates(CURVE_FRACTIONS)
        assert agreed is not None
        assert usage is not None
        assert rates is not None
        for figure, x, y in (
            (pictures.agreement_figure(agreed), "layer", "decisions (of 4)"),
            (pictures.usage_figure(usage), "expert", "layer"),
            (pictures.hits_figure(rates), "expert cache, MiB", "experts found in the cache"),
        ):
            axes = axes_of(figure)
            assert axes.get_xlabel().startswith(x)
            assert axes.get_ylabel() == y
            ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            assert_apart([label for at, label in ticks if at <= axes.get_xlim()[1]], figure)  # others are not drawn
            assert_apart(axes.get_yticklabels(), figure)
        assert list(axes.lines[1].get_ydata()) == [100 * rate for rate in rates.lru]
        assert list(axes.lines[0].get_ydata()) == [100 * rate for rate in rates.fixed]


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 24, 28, 64, 94, 128, 129, 512])
def test_ticks_are_round_and_end_with_the_last(n: int) -> None:
    seen: list[int] = []
    pictures._whole_ticks(seen.extend, n)
    assert seen == sorted(set(seen))
    assert (seen[0], seen[-1]) == (0, n - 1)
    assert len(seen) <= pictures.MOST_TICKS + 1


def test_files_of_each_kind(tmp_path: Path) -> None:
    shape = (24, 20, 32)
    album = pictures.Album({"png": tmp_path / "a" / "b", "svg": tmp_path / "c"})
    paths = [*album.lens(of(*shape), "lens-1"), *album.summary(summary(shape))]
    names = {"lens-1", "agreement", "experts", "hits"}
    assert {path.stem for path in paths} == names
    assert sorted(paths) == sorted([*(tmp_path / "a" / "b").iterdir(), *(tmp_path / "c").iterdir()])
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_only_what_there_is_something_for(tmp_path: Path) -> None:
    album = pictures.Album({"svg": tmp_path})
    assert album.lens(record(), "lens-1") == []
    assert album.summary(Summary([record()])) == []
    dense = random_record(n_expert=0)
    assert [path.stem for path in album.summary(Summary([dense]))] == ["agreement"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Refused, match=r"pictures need matplotlib, the extra \[plots\]: pip install matplotlib"):
        pictures.Album({"png": tmp_path / "new"})
    assert not (tmp_path / "new").exists()


def test_it_is_not_loaded_before_it_is_wanted() -> None:
    code = "import sys, bmoe.cli.app; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
