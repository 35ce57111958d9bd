import math
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.decide import BadLogits, Decider, DecideRequest, DecideResult, KeptPrefix, Refused
from bmoe.decide.backend import Backend
from bmoe.decide.score import log_softmax
from tests.decide.scripted import BOS, N_VOCAB, ScriptedBackend

CHOICES = ("A", "B", "C")
TEXTS = st.text(st.sampled_from("ab .\n"), max_size=12)


def decider(backend: ScriptedBackend, *, cache: bool = True) -> Decider:
    ticks = count()
    port: Backend = backend
    return Decider(port, kept=KeptPrefix() if cache else None, clock=lambda: float(next(ticks)))


def ask(prefix: str, suffix: str, **more: Any) -> DecideRequest:
    return DecideRequest(**{"prefix": prefix, "suffix": suffix, "choices": CHOICES} | more)


def answer(request: DecideRequest, **backend: Any) -> DecideResult:
    return decider(ScriptedBackend(**backend)).decide(request)


class TestAnswer:
    def test_it_is_the_log_softmax_of_the_last_row_at_the_first_tokens(self) -> None:
        backend = ScriptedBackend()
        result = decider(backend).decide(ask("Screen: home.", " Options"))
        tokens = [backend.text_tokens(choice, add_bos=False)[0] for choice in CHOICES]
        assert result.choice_logp == tuple(log_softmax(backend.logits())[tokens])
        assert result.best == int(np.argmax(result.choice_logp))
        assert result.choices == CHOICES
        inside = sum(map(math.exp, result.choice_logp))
        assert result.outside_mass == pytest.approx(1 - inside)

    def test_a_choice_without_mass_stays_minus_infinity(self) -> None:
        backend = ScriptedBackend()
        row = np.zeros(N_VOCAB, np.float32)
        row[backend.text_tokens("B", add_bos=False)[0]] = -np.inf
        result = answer(ask("p", "s"), logits=lambda pieces: row)
        assert result.choice_logp[1] == -math.inf

    def test_what_the_model_would_rather_say_is_told(self) -> None:
        backend = ScriptedBackend()
        row = np.zeros(N_VOCAB, np.float32)
        row[backend.text_tokens("Sure", add_bos=False)[0]] = 30
        result = answer(ask("Sure ", "s"), logits=lambda pieces: row)
        assert result.outside_text == "Sure"
        assert result.outside_text_mass == pytest.approx(1.0)
        assert result.outside_mass == pytest.approx(1.0)

    def test_broken_logits_are_an_error(self) -> None:
        with pytest.raises(BadLogits):
            answer(ask("p", "s"), logits=lambda pieces: np.full(N_VOCAB, np.nan, np.float32))

    def test_the_system_message_comes_first(self) -> None:
        backend = ScriptedBackend()
        decider(backend, cache=False).decide(ask("p", "s", system="be brief"))
        assert list(backend.pieces[0]) == backend.chat_tokens([("system", "be brief"), ("user", "ps")])

    def test_policy_time_leaves_out_state_and_prefill(self) -> None:
        backend = ScriptedBackend()
        clock = [0.0]
        backend.during_prefill = lambda: clock.__setitem__(0, clock[0] + 100.0)
        result = Decider(backend, kept=KeptPrefix(), clock=lambda: clock[0]).decide(ask("some prefix here", "s"))
        assert result.policy_s == 0.0
        assert (result.prefill_s, result.prefill_cpu_s) == (2.0, 4.0)


class TestJoin:
    """T1, C4: the joined text decides the tokens."""

    @pytest.mark.parametrize("text", ["Answer: Yes", "hello world", "The end.\n\nQ:", "1234", "  a  "])
    @pytest.mark.parametrize("template", [True, False])
    def test_every_split_of_a_text_is_the_same_decision(self, text: str, template: bool) -> None:
        results = [
            answer(ask(text[:at], text[at:], reuse_prefix=False, template=template)) for at in range(len(text) + 1)
        ]
        assert len({(result.n_tokens, result.choice_logp) for result in results}) == 1

    def test_the_prompt_is_the_joined_text(self) -> None:
        backend = ScriptedBackend()
        decider(backend).decide(ask("hello wor", "ld", template=False))
        assert [token for piece in backend.pieces for token in piece] == backend.text_tokens(
            "hello world", add_bos=True
        )

    def test_choices_do_not_change_the_prompt(self) -> None:
        one, other = answer(ask("p", "s")), answer(ask("p", "s", choices=("X", "Y")))
        assert one.n_tokens == other.n_tokens

    def test_reuse_falls_at_most_two_tokens_short_of_the_prefix(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend)
        prefix = "Task: turn on Wi-Fi. History: none. "
        one.decide(ask(prefix, "Screen one"))
        n_prefix = len(backend.text_tokens(prefix, add_bos=False)) + 1
        assert one.decide(ask(prefix, "Screen two")).n_reused in range(n_prefix - 2, n_prefix + 1)

    @pytest.mark.parametrize("join", [("Screen: Settings.\n \n", " Options: A) ..."), ("  x", "y  ")])
    def test_a_template_that_trims_is_still_exact(self, join: tuple[str, str]) -> None:
        whole = answer(ask(*join, reuse_prefix=False), strip=True)
        backend = ScriptedBackend(strip=True)
        decider(backend).decide(ask(*join))
        assert [token for piece in backend.pieces for token in piece] == backend.chat_tokens([("user", "".join(join))])
        assert whole.n_tokens == backend.position


class TestRefusals:
    """Before any prefill, and the next request is served."""

    @pytest.mark.parametrize(
        ("request_", "says"),
        [
            (ask("p", "s", choices=()), "choices is empty"),
            (ask("p", "s", choices=("A", "")), r"choices\[1\] '' has no token"),
            (ask("p", "s", choices=("A", "A ")), "both begin with"),
            (ask("", "", template=False), "both empty"),
            (ask("word " * 120, "s"), "the prompt is 123 tokens and the context holds 100"),
        ],
    )
    def test_nothing_is_computed(self, request_: DecideRequest, says: str) -> None:
        backend = ScriptedBackend(n_ctx=100)
        one = decider(backend)
        with pytest.raises(Refused, match=says):
            one.decide(request_)
        assert backend.calls == []
        assert one.decide(ask("p", "s")).best >= 0

    def test_a_model_without_template_refuses_and_serves_raw_prompts(self) -> None:
        backend = ScriptedBackend(has_template=False)
        one = decider(backend)
        with pytest.raises(Refused, match="no chat template"):
            one.decide(ask("p", "s"))
        assert backend.calls == []
        assert one.decide(ask("p", "s", template=False)).best >= 0

    def test_a_refusal_leaves_the_kept_prefix(self) -> None:
        one = decider(ScriptedBackend())
        first = one.decide(ask("a long prefix. ", "one"))
        with pytest.raises(Refused):
            one.decide(ask("another ", "two", choices=("A", "A")))
        assert one.decide(ask("a long prefix. ", "two")).n_reused == first.n_tokens - 3


class TestLimits:
    """L1, T8."""

    @pytest.mark.parametrize("template", [True, False])
    @pytest.mark.parametrize("cache", [True, False])
    def test_the_context_is_filled_to_the_last_token(self, template: bool, cache: bool) -> None:
        request = ask("a b c d", " e f g", template=template)
        need = answer(request).n_tokens
        assert decider(ScriptedBackend(n_ctx=need), cache=cache).decide(request).n_tokens == need
        with pytest.raises(Refused, match=f"the prompt is {need} tokens and the context holds {need - 1}"):
            decider(ScriptedBackend(n_ctx=need - 1), cache=cache).decide(request)

    @pytest.mark.parametrize(("prefix", "suffix"), [("", "s"), ("p", ""), ("", "")])
    @pytest.mark.parametrize("template", [True, False])
    @pytest.mark.parametrize("bos", [True, False])
    def test_empty_halves(self, prefix: str, suffix: str, template: bool, bos: bool) -> None:
        request = ask(prefix, suffix, template=template)
        if not (prefix or suffix or template or bos):
            with pytest.raises(Refused, match="both empty"):
                answer(request, bos=bos)
        else:
            assert answer(request, bos=bos).n_tokens >= 1

    def test_a_template_that_refuses_an_empty_prefix_refuses_no_decision(self) -> None:
        backend = ScriptedBackend()
        whole = backend.chat_tokens

        def picky(messages: Any) -> list[int]:
            if not messages[-1][1]:
                raise Refused("content is empty")
            return whole(messages)

        backend.chat_tokens = picky  # type: ignore[method-assign]
        assert decider(backend).decide(ask("", "s")).n_reused == 0

    def test_one_bos_where_the_model_wants_one(self) -> None:
        for template in (True, False):
            backend = ScriptedBackend(bos=True)
            decider(backend).decide(ask("p", "s", template=template))
            tokens = [token for piece in backend.pieces for token in piece]
            assert tokens.count(BOS) == 1
            assert tokens[0] == BOS

    def test_a_zero_byte_counts(self) -> None:
        assert answer(ask("before\0after", "")).n_tokens > answer(ask("before", "")).n_tokens


class TestKeptPrefix:
    def test_the_first_decision_computes_the_prefix_stores_it_and_goes_on(self) -> None:
        backend = ScriptedBackend()
        result = decider(backend).decide(ask("one two three", " four"))
        keep = result.n_tokens - 3
        assert [call for call, _ in backend.calls] == ["drop", "prefill", "save", "prefill"]
        assert backend.calls[1:3] == [("prefill", keep), ("save", keep)]
        assert (result.n_reused, result.n_prefilled) == (0, result.n_tokens)
        assert result.prefix_state_mib > 0
        assert result.store_s > 0 == result.restore_s

    def test_the_same_prefix_is_restored_and_not_stored_again(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend)
        one.decide(ask("one two three", " four"))
        backend.calls.clear()
        result = one.decide(ask("one two three", " five six"))
        assert [call for call, _ in backend.calls] == ["load", "prefill"]
        assert result.n_reused == backend.calls[0][1]
        assert result.n_reused + result.n_prefilled == result.n_tokens
        assert result.restore_s > 0 == result.store_s

    def test_a_grown_prefix_is_extended_and_kept_instead(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend)
        one.decide(ask("one two", " x"))
        backend.calls.clear()
        grown = one.decide(ask("one two three four", " x"))
        assert [call for call, _ in backend.calls] == ["load", "prefill", "save", "prefill"]
        assert grown.n_reused == backend.calls[0][1]
        assert one.decide(ask("one two three four", " y")).n_reused == backend.calls[2][1]

    def test_another_prefix_starts_empty_and_replaces(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend)
        one.decide(ask("one two three", " x"))
        backend.calls.clear()
        assert one.decide(ask("seven eight nine", " x")).n_reused == 0
        assert [call for call, _ in backend.calls] == ["drop", "prefill", "save", "prefill"]
        assert one.decide(ask("one two three", " x")).n_reused == 0

    def test_a_shorter_prefix_is_not_cut_out_of_a_longer_one(self) -> None:
        one = decider(ScriptedBackend())
        one.decide(ask("one two three four", " x"))
        assert one.decide(ask("one two", " x")).n_reused == 0

    def test_opting_out_computes_whole_and_leaves_the_kept_state(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend)
        first = one.decide(ask("one two three", " x"))
        backend.calls.clear()
        out = one.decide(ask("other words", " x", reuse_prefix=False))
        assert backend.calls == [("drop", 0), ("prefill", out.n_tokens)]
        assert out.prefix_state_mib == first.prefix_state_mib
        assert one.decide(ask("one two three", " y")).n_reused > 0

    def test_off_computes_whole_and_keeps_nothing(self) -> None:
        backend = ScriptedBackend()
        one = decider(backend, cache=False)
        for _ in range(2):
            result = one.decide(ask("one two three", " x"))
            assert (result.n_reused, result.prefix_state_mib) == (0, 0.0)
        assert {call for call, _ in backend.calls} == {"drop", "prefill"}

    def test_restored_is_computed(self) -> None:
        """K1: the same bits as a fresh session that computes the same pieces."""
        one = decider(ScriptedBackend())
        one.decide(ask("one two three", " x"))
        restored = one.decide(ask("one two three", " y"))
        fresh = answer(ask("one two three", " y"))
        assert restored.n_reused > 0 == fresh.n_reused
        assert restored.choice_logp == fresh.choice_logp

    def test_stored_after_a_restore_answers_as_when_computed(self) -> None:
        one = decider(ScriptedBackend())
        one.decide(ask("one two", " x"))
        computed = one.decide(ask("one two three four", " y"))
        restored = one.decide(ask("one two three four", " y"))
        assert restored.n_reused > computed.n_reused > 0
        assert restored.choice_logp == computed.choice_logp

    def test_reuse_grows_with_a_growing_prefix(self) -> None:
        one = decider(ScriptedBackend())
        reused = [one.decide(ask("step " * (5 + step), "now?")).n_reused for step in range(20)]
        assert reused[0] == 0
        assert all(later > earlier for earlier, later in pairwise(reused))

    @given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=8), st.booleans(), st.booleans())
    def test_whatever_came_before_the_prompt_is_computed_once(
        self, requests: list[tuple[str, str, bool]], template: bool, strip: bool
    ) -> None:
        backend = ScriptedBackend(bos=True, strip=strip)
        one = decider(backend)
        for prefix, suffix, reuse in requests:
            before = backend.n_computed
            result = one.decide(ask(prefix, suffix, reuse_prefix=reuse, template=template))
            text = prefix + suffix
            expected = backend.chat_tokens([("user", text)]) if template else backend.text_tokens(text, add_bos=True)
            assert [token for piece in backend.pieces for token in piece] == expected
            assert result.n_reused + result.n_prefilled == result.n_tokens == len(expected)
            assert result.n_prefilled == backend.n_computed - before >= 1
            assert sum(ref() is not None for ref in backend.alive) <= 1


class TestCancelAndFailure:
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_cancelled_decision_leaves_an_empty_state_and_a_working_session(self, at: int) -> None:
        backend = ScriptedBackend(cancel_at=at)
        one = decider(backend)
        cancelled = one.decide(ask("a b c d e f", " g h"))
        assert cancelled.cancelled
        assert (cancelled.best, cancelled.choice_logp, cancelled.outside_mass) == (-1, (), 0.0)
        assert cancelled.n_prefilled == backend.n_computed
        assert backend.pieces == ()
        short = one.decide(ask("short", " one"))
        assert short.n_reused == 0
        assert short.choice_logp == answer(ask("short", " one")).choice_logp

    def test_what_was_kept_before_a_cancel_is_still_right(self) -> None:
        backend = ScriptedBackend(cancel_at=2)
        one = decider(backend)
        one.decide(ask("a b c d", " x"))
        assert one.decide(ask("a b c d e f", " y")).cancelled
        again = one.decide(ask("a b c d", " z"))
        assert again.n_reused > 0
        assert again.choice_logp == answer(ask("a b c d", " z")).choice_logp

    @pytest.mark.parametrize("at", [0, 1])
    def test_a_failure_while_computing_is_passed_on(self, at: int) -> None:
        with pytest.raises(OSError, match="the disk went away"):
            answer(ask("a b c", " d"), fail_at=at)
