"""What the pages show is what one gets: every block that runs bmoe, on the default model, a folder for each page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bmoe import models

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("BMOE_CACHE") or models.default_cache())
PAGES = {"README.md": 3, "docs/decide.md": 5}  # blocks that run, so that none is passed over in silence
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?: ?[%s](?!\w))?")
NOTABLE_MASS = 0.2

pytestmark = pytest.mark.model


@dataclass(frozen=True)
class Example:
    """A block that runs, and the one below it: what it is said to print."""

    language: str
    code: str
    shown: str


def examples(page: str) -> Iterator[Example]:
    """Raises: AssertionError, for a block that runs and has no `text` block next."""
    blocks = FENCE.findall(page)
    for (language, code), (next_language, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python" or re.search(r"(?:^|[|;&$(]) *bmoe ", code, re.MULTILINE):
            assert next_language == "text", f"what does this print?\n{code}"
            yield Example(language, code, shown)


def run(example: Example, folder: Path) -> str:
    """Its stdout and stderr; in a home whose only content is the cache."""
    home = folder / "home"
    if not home.exists():
        (home / ".cache").mkdir(parents=True)
        (home / ".cache" / "bmoe").symlink_to(CACHE.absolute())
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BMOE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-c"] if example.language == "python" else ["sh", "-e", "-c"]
    done = subprocess.run(
        [*command, example.code],
        cwd=folder,
        env={**kept, "HOME": str(home), "PATH": path, "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{example.code}\n{done.stdout}"
    return done.stdout


def assert_same(given: str, shown: str) -> None:
    """The same words and marks, and about the same numbers: other CPUs round differently and take other times."""
    assert wording(given) == wording(shown), f"shown:\n{shown}\ngiven:\n{given}"
    for mine, theirs in zip(NUMBER.findall(given), NUMBER.findall(shown), strict=True):
        tolerance = 5.0 if mine.endswith("%") else 0.2 if "." in mine else 0.0
        is_near = abs(value(mine) - value(theirs)) <= tolerance
        assert is_near or mine.endswith("s"), f"{mine}, shown {theirs}, in\n{given}"


def wording(text: str) -> list[list[str]]:
    without_bars = re.sub("[▏▎▍▌▋▊▉█#]", " ", text)
    without_edges = re.sub(r"<(?=0\.1 %)|>(?=99\.9 %)", "", without_bars)
    return [NUMBER.sub("0", line).split() for line in without_edges.splitlines() if line.strip()]


def value(number: str) -> float:
    return float(number.rstrip(" %s"))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_what_one_gets(page: str, tmp_path: Path) -> None:
    found = list(examples((ROOT / page).read_text(encoding="utf-8")))
    assert len(found) == PAGES[page]
    for example in found:
        given = run(example, tmp_path)
        assert_same(given, example.shown)
        # What people copy should not ask for words that the model would not say.
        for mass in re.findall(r"outside the choices\D*([\d.]+) %|(\d+)% outside", given):
            assert float("".join(mass)) < 100 * NOTABLE_MASS, given


def test_the_help_shows_what_works(tmp_path: Path) -> None:
    """The examples of `bmoe decide --help`, with the files they name; the batch one is in docs/decide.md."""
    (tmp_path / "message.txt").write_text("You won a prize! Click here to claim it.\n")
    said = run(Example("sh", "COLUMNS=200 bmoe decide --help", ""), tmp_path)
    lines = re.sub(r"\\\n *", "", said).splitlines()
    commands = [line for line in map(str.strip, lines) if line.startswith("bmoe decide ")]
    answers = [run(Example("sh", line, ""), tmp_path) for line in commands if "--batch" not in line]
    best = [re.search(r"^> (.*?)  ", answer, re.MULTILINE) for answer in answers]
    assert [found and found[1].strip() for found in best] == ["A) billing", "Yes", "' Paris'"], answers
    assert not [answer for answer in answers if re.search(r"^! outside", answer, re.MULTILINE)]
