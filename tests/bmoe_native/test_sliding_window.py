"""A model whose attention forgets: gemma3-270m, window 512."""

from pathlib import Path

import numpy as np
import pytest

from bmoe_native import Engine, UnsupportedError

TOKENS = [int(token) for token in np.random.default_rng(5).integers(1000, 200_000, 760)]


@pytest.mark.model
def test_states_on_both_sides_of_the_window(named_models: list[Path]) -> None:
    [path] = [path for path in named_models if path.stem == "gemma3-270m"]
    with Engine.open(path, n_ctx=1024, n_ubatch=256) as engine, Engine.open(path, n_ctx=1024, n_ubatch=256) as fresh:
        assert engine.info.n_swa == 512
        for n_kept in (100, 700):
            engine.drop_state()
            engine.prefill(TOKENS[:n_kept])
            state = engine.save_state()
            engine.prefill(TOKENS[:300])
            engine.load_state(state)
            engine.prefill(TOKENS[n_kept : n_kept + 60])
            fresh.drop_state()
            fresh.prefill(TOKENS[:n_kept])
            fresh.prefill(TOKENS[n_kept : n_kept + 60])
            np.testing.assert_array_equal(engine.logits(), fresh.logits())
        # The window before position 100 has been forgotten by now: cutting there must be noticed.
        with pytest.raises(UnsupportedError, match="100 tokens"):
            engine.keep_state(100)
        np.testing.assert_array_equal(engine.logits(), fresh.logits())


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
