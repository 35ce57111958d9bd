"""Perplexity against its definition, over the scripted backend and over real rows."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe import Session
from bmoe.decide import BadLogits, Refused
from bmoe.decide.backend import Float32Array
from bmoe.decide.perplexity import Perplexity, PerplexityRequest, PerplexityResult, RowsBackend, Scored, spans
from bmoe_native import Engine
from tests import tiny
from tests.decide.scripted import Outcome, ScriptedBackend

TEXT = "one two three four five six seven eight nine ten"


class ScriptedRows(ScriptedBackend):
    """Each row is the logits after the pieces before it and its own tokens, one piece each."""

    max_rows = 3

    def prefill_rows(self, tokens: Sequence[int]) -> tuple[Outcome, Float32Array]:
        assert 0 < len(tokens) <= self.max_rows
        rows = []
        for token in tokens:
            outcome = self.prefill([token])
            if outcome.cancelled:
                return outcome, np.empty((len(tokens), 0), np.float32)
            rows.append(self.logits())
        return Outcome(cancelled=False, n_tokens=len(tokens)), np.array(rows)


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_every_token_but_the_first_is_scored_once(n_tokens: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    scored: list[int] = []
    for begin, first, end in spans(n_tokens, window, stride):
        assert begin < first < end <= begin + window
        assert begin == 0 or first - begin >= window - stride
        scored += range(first, end)
    assert scored == list(range(1, n_tokens))


def one_by_one(path: Path, tokens: list[int], window: int, stride: int) -> list[float]:
    """The definition, written out: each token after its context alone, in plain Python."""
    logps = []
    with Engine.open(path, n_ubatch=64) as engine:
        for begin, first, end in spans(len(tokens), window, stride):
            for at in range(first, end):
                engine.drop_state()
                engine.prefill(tokens[begin:at])
                row = [float(x) for x in engine.logits()]
                top = max(row)
                logps.append(row[tokens[at]] - top - math.log(math.fsum(math.exp(x - top) for x in row)))
    return logps


@pytest.mark.parametrize(("window", "stride"), [(0, 0), (32, 16), (40, 39), (8, 1)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3next"])
def test_it_is_what_the_definition_gives(tmp_path: Path, family: str, window: int, stride: int) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=family)
    with Session.open(path, n_ubatch=64) as session:
        result = session.perplexity(PerplexityRequest(text=TEXT * 2, window=window, stride=stride))
        tokens = session._engine.text_tokens(TEXT * 2, add_bos=True)
    wanted = one_by_one(path, tokens, window or 512, stride or (window or 512) // 2)
    assert len(result.token_logp) == len(tokens) - 1 == result.n_tokens - 1
    np.testing.assert_allclose(result.token_logp, wanted, atol=2e-2)  # pieces of other widths round differently
    assert result.perplexity == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=1e-2)
    assert result.perplexity == math.exp(result.nll)


def test_progress_and_costs_are_told() -> None:
    backend = ScriptedRows()
    port: RowsBackend = backend
    seen: list[Scored] = []
    request = PerplexityRequest(text=TEXT, choices=("A", "B"), window=8, stride=4)
    result = Perplexity(port).score(request, seen.append)
    total = len(backend.text_tokens(TEXT, add_bos=True)) - 1
    assert {scored.n_to_score for scored in seen} == {total} == {seen[-1].n_scored}
    assert [scored.n_scored for scored in seen] == sorted({scored.n_scored for scored in seen})
    assert seen[-1].nll == pytest.approx(result.nll)
    assert result.n_prefilled == backend.n_computed and result.prefill_s > 0
    assert backend.position == 0


@pytest.mark.parametrize("cancel_at", [0, 1, 2, 6])
def test_a_cancel_gives_what_was_scored_by_then(cancel_at: int) -> None:
    whole = Perplexity(ScriptedRows()).score(PerplexityRequest(text=TEXT, choices=("A",)))
    backend = ScriptedRows(cancel_at=cancel_at)
    result = Perplexity(backend).score(PerplexityRequest(text=TEXT, choices=("A",)))
    assert result.cancelled and result.choice_logp == ()
    assert result.token_logp == whole.token_logp[: len(result.token_logp)]
    assert len(result.token_logp) == max(cancel_at - 1, 0) // 3 * 3
    assert backend.position == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": 5}, "text must be text"),
        ({"window": -1}, "window must be a whole number"),
        ({"window": True}, "window must be a whole number"),
        ({"stride": 1.5}, "stride must be a whole number"),
        ({"choices": "AB"}, "choices must be a list"),
        ({"window": 1}, "window is 1, allowed are 2 to the context's 4096"),
        ({"window": 4097}, "window is 4097"),
        ({"window": 8, "stride": 8}, "stride is 8 and must be less than the window of 8"),
        ({"text": "one"}, "1 tokens"),
        ({"text": ""}, "0 tokens"),
        ({"choices": ["A", "A"]}, "both begin with"),
        ({"text": "x, " * 3000, "choices": ["A"]}, r"\d{4} tokens.* context of 4096"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything(fields: dict[str, object], says: str) -> None:
    backend = ScriptedRows()
    with pytest.raises(Refused, match=says):
        Perplexity(backend).score(PerplexityRequest(**{"text": TEXT, **fields}))  # type: ignore[arg-type]
    assert backend.calls == []


def test_broken_logits_are_no_number() -> None:
    with pytest.raises(BadLogits):
        Perplexity(ScriptedRows(logits=lambda _: np.full(9, np.nan, np.float32))).score(PerplexityRequest(text=TEXT))


def made(*logps: float) -> PerplexityResult:
    return PerplexityResult(
        cancelled=False, n_tokens=len(logps) + 1, token_logp=logps, choice_logp=(), n_prefilled=0, prefill_s=0.0
    )


def test_the_figures_at_their_ends() -> None:
    assert math.isnan(made().nll) and math.isnan(made().perplexity) and math.isnan(made(-1.0).stderr)
    assert made(-math.inf, -1.0).perplexity == math.inf and made(-800.0).perplexity == math.inf
    assert made(0.0, 0.0).perplexity == 1.0
    assert made(-1.0, -3.0).stderr == pytest.approx(1.0)
