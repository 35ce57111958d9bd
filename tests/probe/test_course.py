"""How decisions came about: answers, shares and margins by layer, and how many agree."""

import math
from typing import Any

import numpy as np
import pytest

from bmoe.probe.course import NO_ANSWER, agreement, course, shares
from tests.probe.made import record


def came(lens: Any, **fields: Any) -> Any:
    found = course(record(lens, **fields))
    assert found is not None
    return found


def test_a_decision_by_layer() -> None:
    found = came([[3, 1, 0], [0, 2, 1], [2, 1, 5], [1, 0, 2]])
    assert found.answers == (0, 1, 2, 2)
    assert found.margins == (-3, -1, 3, 1)
    assert found.stays_from == 2
    weights = [math.exp(value) for value in (1, 0, 2)]
    assert found.shares[3] == pytest.approx(weights[2] / sum(weights))


@pytest.mark.parametrize(
    ("lens", "stays_from"), [([[1, 0], [2, 0]], 0), ([[1, 0], [0, 1], [1, 0]], 2), ([[0, 1], [1, 0]], 1)]
)
def test_the_layer_from_which_it_stays(lens: Any, stays_from: int) -> None:
    assert came(lens).stays_from == stays_from


def test_the_last_layer_is_the_decision_even_where_the_last_bit_says_otherwise() -> None:
    found = came([[0, 1], [1.0, 1.000001]], best=0)
    assert found.answers == (1, 0)
    assert found.stays_from == 1


def test_what_is_no_number_is_no_answer() -> None:
    found = came([[np.nan, np.nan], [np.nan, 1], [-np.inf, 1], [2, 1]])
    assert found.answers == (NO_ANSWER, 1, 1, 0)
    assert found.shares[:3] == (0.0, 1.0, 1.0)
    assert found.margins == (0.0, 0.0, 0.0, 1.0)
    assert found.stays_from == 3


def test_a_single_choice_and_large_logits() -> None:
    found = came([[700.0], [-700.0]])
    assert (found.answers, found.shares, found.margins, found.stays_from) == ((0, 0), (1, 1), (0, 0), 0)
    assert came([[1e30, -1e30], [3e38, -3e38]]).shares == (1, 1)


def test_shares_add_up_to_one() -> None:
    lens = np.random.default_rng(0).normal(0, 10, (50, 20))
    np.testing.assert_allclose(shares(record(lens)).sum(axis=1), 1)


def test_without_a_lens_there_is_no_course() -> None:
    assert course(record()) is None
    assert agreement([]) is None


def test_agreement_is_counted_by_layer() -> None:
    found = agreement([came([[0, 1], [1, 0], [1, 0]]), came([[1, 0], [0, 1], [1, 0]]), came([[0, 1], [0, 1], [0, 1]])])
    assert found is not None
    assert (found.n_decisions, found.n_agree, found.n_constant) == (3, (2, 2, 3), 2)
