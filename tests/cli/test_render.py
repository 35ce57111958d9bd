import dataclasses
import io
import math

import pytest
from rich.console import Console

from bmoe.cli.render import BAR_CELLS, bar, decision, percent, printable
from bmoe.decide import DecideResult
from tests.test_records import RESULT


def shown(
    result: DecideResult, *, options: tuple[str, ...] | None = None, ascii_only: bool = False, width: int = 80
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system="standard", highlight=False)
    console.print(decision(result, options, ascii_only=ascii_only, width=width))
    return file.getvalue()


def outside(mass: float) -> DecideResult:
    return dataclasses.replace(RESULT, outside_mass=mass, choice_logp=(math.log(1 - mass), -math.inf))


@pytest.mark.parametrize(("mass", "stands_out"), [(0.01, False), (0.099, False), (0.1, True), (0.9, True)])
def test_mass_outside_is_in_yellow_from_a_tenth_on(mass: float, stands_out: bool) -> None:
    line = next(line for line in shown(outside(mass)).splitlines() if "outside the choices" in line)
    assert ("\x1b[1;33m" in line) is stands_out


def test_the_best_is_green() -> None:
    best, other, *_ = shown(RESULT, options=("billing", "sales")).splitlines()
    assert "\x1b[1;32m" in best
    assert "A) billing" in best
    assert "\x1b[1;32m" not in other


@pytest.mark.parametrize(
    ("mass", "text"), [(0.3, "Not sure: 30.0 %"), (0.7, "The model wanted to say something else: 70.0 %")]
)
def test_how_sure_is_said(mass: float, text: str) -> None:
    assert text in shown(outside(mass))


def test_ascii_only_is_ascii() -> None:
    text = shown(outside(0.3), options=("a", "b"), ascii_only=True)
    assert text.isascii()
    assert "#" in text


def test_a_long_option_is_folded_not_cut() -> None:
    text = shown(RESULT, options=("word " * 40 + "end", "b"))
    assert text.count("word") == 40
    assert "end" in text


@pytest.mark.parametrize(("width", "longest"), [(200, 42), (80, 42), (60, 28), (40, 14), (30, 16), (24, 10)])
def test_names_keep_room_at_every_width(width: int, longest: int) -> None:
    word = "x" * (longest - len("A) "))
    text = shown(RESULT, options=(word, "b"), width=width)
    assert f"A) {word}" in text
    assert "77.9 %" in text
    assert ("█" in text) is (width >= 40)


@pytest.mark.parametrize(
    ("mass", "text"),
    [(0.0, "0 %"), (1e-12, "<0.1 %"), (0.001, "0.1 %"), (0.5, "50.0 %"), (0.99951, ">99.9 %"), (1.0, "100.0 %")],
)
def test_percent(mass: float, text: str) -> None:
    assert percent(mass) == text


def test_bars_end_where_they_should() -> None:
    assert bar(0.0) == ""
    assert bar(1.0) == "█" * BAR_CELLS
    assert bar(0.5) == "█" * (BAR_CELLS // 2)
    assert bar(1 / (BAR_CELLS * 8)) == "▏"
    assert len(bar(1.0, ascii_only=True)) == BAR_CELLS


def test_reuse_and_time_are_in_the_last_line() -> None:
    assert "12 tokens, 5 of them reused, 0.51 s" in shown(RESULT)


def test_printable_keeps_scripts_and_emoji() -> None:
    assert printable("né 歪 👍\t\x07") == "né 歪 👍\\t\\x07"
