"""Probabilities against an independent program: plain Python over the raw logits, on real models."""

import math
from pathlib import Path

import numpy as np
import pytest

from bmoe import Session
from bmoe.decide.score import log_softmax
from bmoe_native import Engine
from tests import tiny

CHOICES = ("A", "B", "C", "Yes")


def independent_logp(logits: list[float], token: int) -> float:
    """log p of one token: the sum in exact rationals-free arithmetic, math.fsum over the shifted exponentials."""
    top = max(logits)
    return logits[token] - top - math.log(math.fsum(math.exp(x - top) for x in logits))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"])
def test_log_probabilities_are_those_of_an_independent_log_softmax(named_models: list[Path], name: str) -> None:
    [path] = [path for path in named_models if path.stem == name]
    prompt = "The capital of France is\nA) Rome B) Paris C) Oslo\nAnswer:"
    with Session.open(path) as session:
        result = session.decide(prefix=prompt, suffix="", choices=CHOICES, template=False, reuse_prefix=False)
    with Engine.open(path) as engine:
        engine.prefill(engine.text_tokens(prompt, add_bos=True))
        row = engine.logits()
        firsts = [engine.text_tokens(choice, add_bos=False)[0] for choice in CHOICES]
    logits = [float(x) for x in row]
    assert abs(math.fsum(np.exp(log_softmax(row))) - 1.0) < 1e-9
    for token, logp in zip(firsts, result.choice_logp, strict=True):
        assert abs(independent_logp(logits, token) - logp) < 1e-6
    inside = math.fsum(math.exp(independent_logp(logits, token)) for token in firsts)
    assert abs(1.0 - inside - result.outside_mass) < 1e-9


def test_logits_are_the_head_times_the_last_state(tmp_path: Path) -> None:
    """The row of one token is moved by a known factor, and its logit moves by it: the row read is the right one."""

    def scaled(rows: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        rows[65] *= 2.0
        return rows

    plain, changed = tiny.write(tmp_path / "plain.gguf"), tiny.write(tmp_path / "changed.gguf", head=scaled)
    rows = []
    for path in (plain, changed):
        with Engine.open(path, n_threads=1) as engine:
            engine.prefill([1, 2, 3, 4])
            rows.append(engine.logits())
    np.testing.assert_array_equal(np.delete(rows[0], 65), np.delete(rows[1], 65))
    assert rows[1][65] == pytest.approx(2.0 * rows[0][65], rel=1e-6)


def test_a_choice_without_mass_is_minus_infinity_or_far_below(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "loud.gguf", head=lambda rows: rows * 1e4)
    with Session.open(path) as session:
        result = session.decide(prefix="x", suffix="", choices=("a", "b"))
    assert all(logp <= 0.0 for logp in result.choice_logp) and not any(math.isnan(x) for x in result.choice_logp)
    assert 0.0 <= result.outside_mass <= 1.0


@pytest.mark.model
def test_the_policy_costs_little_beside_the_prefill(named_models: list[Path]) -> None:
    """What is asserted is that it is counted apart; the figure is in docs/benchmarks.md."""
    [path] = [path for path in named_models if path.stem == "qwen2.5-coder-1.5b"]
    with Session.open(path) as session:
        result = session.decide(prefix="Is this spam? You won! ", suffix="Answer Yes or No.", choices=("Yes", "No"))
    assert 0.0 < result.policy_s < result.prefill_s
