"""What the README promises of the default model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bmoe import Session, models

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("BMOE_CACHE") or models.default_cache())
TEAMS = ("billing", "technical support", "sales")

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.open(cache=CACHE) as session:
        yield session


@pytest.mark.parametrize(
    ("question", "options", "right"),
    [
        ("What is the capital of France?", ("Berlin", "Paris", "Rome", "Madrid"), "Paris"),
        ("What is 2+2?", ("3", "5", "4", "22"), "4"),
        ("Which team should handle this? I was charged twice.", TEAMS, "billing"),
        ("Which team should handle this? The app crashes when I open it.", TEAMS, "technical support"),
    ],
)
def test_a_question_is_answered_right(session: Session, question: str, options: tuple[str, ...], right: str) -> None:
    result = session.decide(session.lettered(question, options))
    assert options[result.best] == right
    assert result.outside_mass < 0.1


def test_the_agent_turns_on_wifi() -> None:
    ran = subprocess.run([sys.executable, ROOT / "examples" / "agent_demo.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 of 3 decisions right" in ran.stdout


def test_the_command_prints_one_object() -> None:
    command = [sys.executable, "-m", "bmoe.cli", "decide", "Capital of France?", "-o", "Rome", "-o", "Paris", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert record["options"][record["best"]] == "Paris"
