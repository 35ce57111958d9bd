"""The gates, as functions over a model: each raises AssertionError where two ways to one result differ in a bit.

Source of the letters: docs/decide.md, "What is exact".
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bmoe import DecideResult, GenerateRequest, Refused, Sampling, Session
from bmoe.decide.perplexity import PerplexityRequest

CHOICES = ("b", "k", "x", "A", "the")
# "th" and "e" merge in the tiny vocabulary, so that the first prefix ends in a token that the grown one does not hold.
PREFIX = "Task: turn on the light in the kitchen and then in the hall. History: none. Rule: be quick and be th"
GROWN = PREFIX + "en done. Step 1: opened Settings, saw a list of five entries. Step 2: opened Network and the"
SUFFIXES = ("! Screen: A) Network b) Display. Answer?", "? Screen: Wi-Fi is off, 7 networks. Which one is it?")

# Wider than a window and than a tile of attention, so that where a window's cells lie is seen in the last bits.
TURNS = ("Say something about the sea.", f"And of this? {GROWN}", f"Then of this? {GROWN}")


def opened(path: Path, n_threads: int, **options: Any) -> Session:
    return Session.open(path, n_threads=n_threads, n_ubatch=64, **options)


def ask(session: Session, prefix: str, suffix: str, **options: Any) -> DecideResult:
    return session.decide(prefix=prefix, suffix=suffix, choices=CHOICES, **options)


def gate_a(path: Path, n_threads: int, prefix: str = PREFIX, **options: Any) -> None:
    """A restored prefix scores what a fresh session that computes it scores."""
    with opened(path, n_threads) as session:
        ask(session, prefix, SUFFIXES[0], **options)
        ask(session, "Another prefix altogether. ", "x", reuse_prefix=False)
        restored = ask(session, prefix, SUFFIXES[1], **options)
    with opened(path, n_threads) as fresh:
        computed = ask(fresh, prefix, SUFFIXES[1], **options)
    assert restored.n_reused > 0 == computed.n_reused
    assert restored.n_reused + restored.n_prefilled == computed.n_prefilled == restored.n_tokens
    assert restored.choice_logp == computed.choice_logp


def gate_b(path: Path, n_threads: int) -> None:
    """A state stored after a partial restore answers as it did when it was computed."""
    with opened(path, n_threads) as session:
        ask(session, PREFIX, SUFFIXES[0])
        extended = ask(session, GROWN, SUFFIXES[1])
        again = ask(session, GROWN, SUFFIXES[1])
        ask(session, "Another prefix altogether. ", "x", reuse_prefix=False)
        later = ask(session, GROWN, SUFFIXES[1])
    assert 0 < extended.n_reused < again.n_reused == later.n_reused
    assert extended.choice_logp == again.choice_logp == later.choice_logp


def gate_c(path: Path, n_threads: int) -> None:
    """A decision prefilled whole scores what perplexity() scores the same choices after the same text."""
    text = GROWN + SUFFIXES[1]
    with opened(path, n_threads) as session:
        ask(session, PREFIX, SUFFIXES[0], template=False)
        scored = session.perplexity(PerplexityRequest(text=text, choices=CHOICES, window=64))
        decided = ask(session, GROWN, SUFFIXES[1], template=False, reuse_prefix=False)
    with opened(path, n_threads) as fresh:
        alone = ask(fresh, GROWN, SUFFIXES[1], template=False, reuse_prefix=False)
    assert scored.choice_logp == decided.choice_logp == alone.choice_logp
    assert len(scored.token_logp) == scored.n_tokens - 1


def talk(session: Session, between: Callable[[Session], None]) -> tuple[list[str], list[int], np.ndarray]:
    """Three turns of one conversation, something else before each; texts, reuse, and the last logits."""
    hot = Sampling(temperature=1.5, seed=5)
    texts, reused = [], []
    for turn, prompt in enumerate(TURNS):
        between(session)
        request = GenerateRequest(prompt=prompt, n_predict=12, clear_kv=turn == 0, sampling=hot)
        result = session.generate(request)
        texts.append(result.text)
        reused.append(result.n_reused)
    return texts, reused, session._engine.logits()


def gate_e(path: Path, n_threads: int) -> None:
    """A generate() after a decision, and after a refused one, equals one that never saw them."""

    def interrupt(session: Session) -> None:
        ask(session, GROWN, SUFFIXES[1])
        try:
            session.decide(prefix="x", suffix="y", choices=("ab", "ac"))
        except Refused:
            return
        raise AssertionError("two choices with one first token were taken")

    with opened(path, n_threads) as session:
        texts, reused, logits = talk(session, interrupt)
    with opened(path, n_threads) as quiet:
        wanted_texts, wanted_reused, wanted_logits = talk(quiet, lambda _: None)
    assert texts == wanted_texts and all(texts)
    assert reused == wanted_reused and all(reused[1:])
    np.testing.assert_array_equal(logits, wanted_logits)


def gate_f(path: Path, n_threads: int) -> None:
    """A session without decisions refuses them, allocates nothing for them, and goes on."""
    with opened(path, n_threads, decide=False) as session:
        assert session._decider is None and session._kept is None
        for _ in range(2):
            try:
                ask(session, PREFIX, SUFFIXES[0])
            except Refused as refusal:
                assert "without decisions" in str(refusal)
            else:
                raise AssertionError("a decision was answered")
        assert session.prefix_state_mib == 0.0
        texts, _, logits = talk(session, lambda _: None)
    with opened(path, n_threads) as able:
        wanted_texts, _, wanted_logits = talk(able, lambda _: None)
    assert texts == wanted_texts
    np.testing.assert_array_equal(logits, wanted_logits)
