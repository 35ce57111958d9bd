"""A model whose attention forgets: gemma3-270m, window 512."""

from pathlib import Path

import numpy as np
import pytest

from bmoe_native import Engine, UnsupportedError

TOKENS = [int(token) for token in np.random.default_rng(5).integers(1000, 200_000, 1700)]


@pytest.mark.model
@pytest.mark.parametrize("n_kept", [100, 700, 1500])
def test_states_on_both_sides_of_the_window(named_models: list[Path], n_kept: int) -> None:
    [path] = [path for path in named_models if path.stem == "gemma3-270m"]
    with Engine.open(path, n_ctx=2048) as engine, Engine.open(path, n_ctx=2048) as fresh:
        assert engine.info.n_swa == 512
        engine.prefill(TOKENS[:n_kept])
        state = engine.save_state()
        engine.prefill(TOKENS[:300])
        engine.load_state(state)
        engine.prefill(TOKENS[n_kept : n_kept + 60])
        fresh.prefill(TOKENS[:n_kept])
        before = fresh.logits()
        fresh.save_state()
        np.testing.assert_array_equal(fresh.logits(), before)
        fresh.prefill(TOKENS[n_kept : n_kept + 60])
        np.testing.assert_array_equal(engine.logits(), fresh.logits())


@pytest.mark.model
def test_a_window_is_not_cut(named_models: list[Path]) -> None:
    [path] = [path for path in named_models if path.stem == "gemma3-270m"]
    with Engine.open(path, n_ctx=2048) as engine:
        engine.prefill(TOKENS[:1500])
        before = engine.logits()
        with pytest.raises(UnsupportedError, match="1499 tokens"):
            engine.keep_state(1499)
        assert engine.position == 1500
        np.testing.assert_array_equal(engine.logits(), before)


@pytest.mark.model
def test_a_cancel_that_cannot_be_undone_empties_the_state(named_models: list[Path]) -> None:
    [path] = [path for path in named_models if path.stem == "gemma3-270m"]
    with Engine.open(path, n_ctx=1024, n_ubatch=256) as engine:
        engine.prefill(TOKENS[:20])
        engine.cancel()
        assert engine.prefill(TOKENS[:700]).cancelled and engine.position in (0, 20)
        engine.drop_state()
        engine.prefill(TOKENS[:20])
        wanted = engine.logits()
        engine.drop_state()
        engine.prefill(TOKENS[:20])
        np.testing.assert_array_equal(engine.logits(), wanted)
