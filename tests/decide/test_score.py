import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.decide.backend import Float32Array
from bmoe.decide.score import BadLogits, log_softmax, score

ROWS = st.lists(st.floats(-1e5, 1e5, width=32), min_size=2, max_size=40)


def row(*values: float) -> Float32Array:
    return np.array(values, np.float32)


def by_hand(logits: Float32Array) -> list[float]:
    """Log-softmax in Python's own floats, exactly summed."""
    values = [float(value) for value in logits]
    top = max(values)
    total = math.log(math.fsum(math.exp(value - top) for value in values))
    return [value - top - total for value in values]


@given(ROWS)
def test_log_softmax_is_right_and_sums_to_one(values: list[float]) -> None:
    logits = row(*values)
    assert log_softmax(logits) == pytest.approx(by_hand(logits), abs=1e-9)
    assert math.fsum(np.exp(log_softmax(logits))) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4, 2e4])
def test_a_whole_vocabulary_is_right_at_any_scale(scale: float) -> None:
    logits = (np.random.default_rng(7).normal(0, 5, 151_936) * scale).astype(np.float32)
    expected = by_hand(logits)
    picked = [0, 151_935, int(logits.argmax()), int(logits.argmin())]
    assert list(score(logits, picked).choice_logp) == pytest.approx([expected[i] for i in picked], abs=1e-6)


@given(ROWS)
def test_a_choice_has_the_bits_that_the_whole_row_has(values: list[float]) -> None:
    logits = row(*values)
    picked = list(range(0, len(values), 2))
    assert list(score(logits, picked).choice_logp) == list(log_softmax(logits)[picked])


@pytest.mark.parametrize("seed", range(20))
def test_other_ways_to_sum_come_to_the_same_double(seed: int) -> None:
    """libm's exp, and sums in other orders: what hosts in other languages do."""
    logits = (np.random.default_rng(seed).normal(0, 4, 10_000)).astype(np.float32)
    values = [float(value) for value in logits]
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    mine = log_softmax(logits).tolist()
    for total in (math.fsum(weights), sum(weights), sum(reversed(weights)), sum(sorted(weights))):
        norm = round(math.log(total) * 2**32) / 2**32
        assert [value - top - norm for value in values] == mine


def test_the_mass_outside_is_summed_not_subtracted() -> None:
    logits = row(100.0, 40.0, 39.0)
    outside = score(logits, [0]).outside_mass
    assert outside == pytest.approx(math.exp(-60) + math.exp(-61), rel=1e-9)
    assert outside > 0.0


@given(ROWS, st.data())
def test_inside_and_outside_are_everything(values: list[float], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, unique=True))
    scores = score(row(*values), chosen)
    inside = math.fsum(map(math.exp, scores.choice_logp))
    assert inside + scores.outside_mass == pytest.approx(1.0, abs=1e-9)
    assert scores.choice_logp[scores.best] == max(scores.choice_logp)
    assert scores.outside_token not in chosen


def test_the_likeliest_outside_is_told() -> None:
    scores = score(row(1.0, 5.0, 2.0, 4.0), [0, 1])
    assert scores.outside_token == 3
    assert scores.outside_token_mass == pytest.approx(math.exp(by_hand(row(1.0, 5.0, 2.0, 4.0))[3]))


def test_choices_that_are_the_vocabulary_have_nothing_outside() -> None:
    scores = score(row(1.0, 2.0), [1, 0])
    assert (scores.outside_mass, scores.outside_token, scores.outside_token_mass) == (0.0, -1, 0.0)


def test_a_choice_without_mass_is_minus_infinity() -> None:
    scores = score(row(0.0, -np.inf, 0.0), [0, 1])
    assert scores.choice_logp[0] == pytest.approx(math.log(0.5))
    assert scores.choice_logp[1] == -math.inf
    assert scores.best == 0


@pytest.mark.parametrize(
    "logits", [row(1.0, np.nan), row(np.nan, np.nan), row(1.0, np.inf), row(-np.inf, -np.inf), row()]
)
def test_what_is_no_distribution_is_an_error(logits: Float32Array) -> None:
    with pytest.raises(BadLogits):
        score(logits, [0])
    with pytest.raises(BadLogits):
        log_softmax(logits)


def test_scoring_leaves_the_logits_alone() -> None:
    logits = row(1.0, 2.0, 3.0)
    score(logits, [2])
    assert list(logits) == [1.0, 2.0, 3.0]
