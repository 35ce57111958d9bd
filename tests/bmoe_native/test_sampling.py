"""Drawing tokens, and rows of logits."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, LogitsError, StateError
from bmoe_native._lib import ffi, lib
from tests import tiny

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 256, 50)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(tiny.write(tmp_path / "m.gguf"), n_ubatch=64, n_threads=1) as opened:
        yield opened


def probabilities(engine: Engine) -> np.ndarray:
    row = engine.logits().astype(np.float64)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def draws(engine: Engine, count: int, **sampling: Any) -> list[int]:
    engine.start_sampling(**sampling)
    return [engine.sample() for _ in range(count)]


def test_the_default_is_the_likeliest_token(engine: Engine) -> None:
    engine.prefill(PROMPT)
    likeliest = int(engine.logits().argmax())
    assert {engine.sample() for _ in range(3)} == {likeliest}
    assert set(draws(engine, 3, seed=9, top_k=50)) == {likeliest}
    assert set(draws(engine, 9, temperature=5.0, top_k=1)) == {likeliest}
    assert set(draws(engine, 9, temperature=1e-45)) == {likeliest} == set(draws(engine, 9, temperature=2e-4))
    assert set(draws(engine, 9, temperature=1.0, top_p=0.0)) == {likeliest}


def test_draws_follow_the_distribution(engine: Engine) -> None:
    engine.prefill(PROMPT)
    wanted = probabilities(engine)
    count = 4000
    seen = Counter(draws(engine, count, temperature=1.0, seed=7))
    for token in np.argsort(wanted)[-4:]:
        share, sigma = seen[int(token)] / count, np.sqrt(wanted[token] * (1 - wanted[token]) / count)
        assert abs(share - wanted[token]) < 5 * sigma


@pytest.mark.parametrize(("sampling", "allowed"), [({"top_k": 5}, 5), ({"top_p": 0.5}, None), ({"min_p": 0.3}, None)])
def test_the_cuts_cut(engine: Engine, sampling: dict[str, Any], allowed: int | None) -> None:
    engine.prefill(PROMPT)
    p = probabilities(engine)
    order = np.argsort(-p)
    if allowed is None and "top_p" in sampling:
        allowed = int(np.searchsorted(np.cumsum(p[order]), sampling["top_p"])) + 1
    if allowed is None:
        allowed = int((p >= sampling["min_p"] * p.max()).sum())
    seen = set(draws(engine, 3000, temperature=1.0, seed=2, **sampling))
    assert seen == {int(token) for token in order[:allowed]}


def test_equal_seeds_draw_equally_and_others_do_not(engine: Engine) -> None:
    engine.prefill(PROMPT)
    one = draws(engine, 30, temperature=2.0, seed=1)
    assert draws(engine, 30, temperature=2.0, seed=1) == one
    assert draws(engine, 30, temperature=2.0, seed=2) != one
    last = draws(engine, 30, temperature=2.0, seed=2**32 - 1)
    assert draws(engine, 30, temperature=2.0, seed=2**32 - 1) == last != one


def test_a_draw_moves_nothing(engine: Engine) -> None:
    engine.prefill(PROMPT)
    before = engine.logits()
    draws(engine, 5, temperature=2.0, seed=1)
    assert engine.position == len(PROMPT)
    np.testing.assert_array_equal(engine.logits(), before)


def test_without_logits_there_is_nothing_to_draw_from(engine: Engine) -> None:
    with pytest.raises(StateError, match="no logits"):
        engine.sample()
    engine.prefill(PROMPT)
    engine.drop_state()
    with pytest.raises(StateError, match="no logits"):
        engine.sample()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_an_error_and_the_engine_goes_on(tmp_path: Path, value: float) -> None:
    def break_head(rows: Any) -> Any:
        rows[17 if value != -np.inf else slice(None)] = value
        return rows

    with Engine.open(tiny.write(tmp_path / "bad.gguf", head=break_head), n_threads=1) as engine:
        engine.prefill(PROMPT)
        for temperature in (0.0, 1.0):
            engine.start_sampling(temperature=temperature)
            with pytest.raises(LogitsError, match="logits are broken"):
                engine.sample()
        assert engine.prefill(PROMPT).n_tokens == 50


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 101.0},
        {"top_k": -1},
        {"top_k": 2**31},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_sampling_out_of_range_is_refused_and_the_old_stays(engine: Engine, sampling: dict[str, Any]) -> None:
    engine.prefill(PROMPT)
    wanted = draws(engine, 8, temperature=2.0, seed=4)
    engine.start_sampling(temperature=2.0, seed=4)
    with pytest.raises(ArgumentError, match=next(iter(sampling))):
        engine.start_sampling(**sampling)
    assert [engine.sample() for _ in range(8)] == wanted


def test_rows_are_the_logits_after_each_token(engine: Engine) -> None:
    outcome, rows = engine.prefill_rows(PROMPT[:20])
    assert (outcome.n_tokens, outcome.cancelled, rows.shape) == (20, False, (20, engine.info.n_vocab))
    np.testing.assert_array_equal(rows[-1], engine.logits())
    for at in (0, 7, 19):
        engine.drop_state()
        engine.prefill(PROMPT[: at + 1])
        np.testing.assert_allclose(rows[at], engine.logits(), atol=2e-2)
    assert np.std(rows, axis=0).max() > 0.1


def test_rows_go_on_from_the_state(engine: Engine) -> None:
    engine.prefill(PROMPT[:30])
    _, rows = engine.prefill_rows(PROMPT[30:50])
    engine.drop_state()
    engine.prefill(PROMPT)
    np.testing.assert_allclose(rows[-1], engine.logits(), atol=2e-2)


def test_rows_are_bounded_and_cancelled_like_a_prefill(engine: Engine) -> None:
    assert engine.max_rows == 32
    with pytest.raises(ArgumentError, match="33 tokens, and rows are given for at most 32"):
        engine.prefill_rows(PROMPT[:33])
    assert engine.position == 0
    engine.cancel()
    outcome, _ = engine.prefill_rows(PROMPT[:5])
    assert outcome.cancelled and outcome.n_tokens == 0 and engine.position == 0


def test_a_small_ubatch_bounds_the_rows(tmp_path: Path) -> None:
    with Engine.open(tiny.write(tmp_path / "m.gguf"), n_ubatch=4) as engine:
        assert engine.max_rows == 4
        assert engine.prefill_rows(PROMPT[:4])[1].shape == (4, engine.info.n_vocab)


def test_room_for_too_few_rows_changes_nothing(engine: Engine) -> None:
    f, c = ffi(), lib()
    tokens, rows = f.new("int32_t[]", PROMPT[:3]), f.new("float[]", [-7.0] * 600)
    spent = f.new("bmoe_counters *")
    spent.size_bytes = f.sizeof("bmoe_counters")
    assert c.bmoe_prefill_rows(engine._handle, tokens, 3, rows, 600, spent) == c.BMOE_E_TOO_SMALL
    assert set(rows) == {-7.0} and engine.position == 0 and spent.n_graphs == 0
    spent.size_bytes = 8
    assert c.bmoe_prefill(engine._handle, tokens, 3, spent) == c.BMOE_E_ARGUMENT and engine.position == 0


def test_what_a_prefill_spent_is_what_the_counters_rose_by(engine: Engine) -> None:
    before = engine.counters()
    outcome = engine.prefill(PROMPT * 2)
    after = engine.counters()
    assert outcome.n_tokens == after.n_prefill_tokens - before.n_prefill_tokens == 100
    assert outcome.prefill_s == pytest.approx(after.prefill_s - before.prefill_s)
    assert outcome.n_major_faults == after.n_major_faults - before.n_major_faults
