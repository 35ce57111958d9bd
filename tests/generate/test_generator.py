"""A turn in its steps, over a scripted model."""

from itertools import count
from typing import Any

import pytest

from bmoe.decide import Refused
from bmoe.decide.prefix import MIB
from bmoe.generate import GenerateBackend, GenerateRequest, GenerateResult, Generator, Sampling, Step
from tests.generate.scripted import TOOL, ScriptedWriter


def writer(backend: ScriptedWriter) -> Generator:
    ticks = count()
    port: GenerateBackend = backend
    return Generator(port, clock=lambda: float(next(ticks)))


def say(generator: Generator, prompt: str = "hi", **options: Any) -> tuple[GenerateResult, list[Step]]:
    steps: list[Step] = []
    turn = generator.prepare(GenerateRequest(prompt=prompt, **options))
    result = generator.generate(turn, steps.append)
    assert "".join(step.delta_text for step in steps) == result.text
    assert "".join(step.delta_reasoning for step in steps) == result.reasoning
    return result, steps


def test_a_turn_to_its_end() -> None:
    backend = ScriptedWriter(b"hello")
    result, steps = say(writer(backend), n_predict=20)
    assert (result.ending, result.text, result.n_generated, result.cancelled) == ("end", "hello", 5, False)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5] and {step.steps for step in steps} == {20}
    assert (result.n_prompt, result.n_reused, result.n_past) == (5, 0, 10)
    assert (result.prefill_s, result.prefill_cpu_s) == (1.0, 2.0)
    assert (result.generate_cpu_s, result.n_major_faults) == (10.0, 15)
    assert result.generate_s > 0 and all(step.wall_s > 0 for step in steps)
    assert [(step.cpu_s, step.n_major_faults) for step in steps] == [(0.0, 0), *[(2.0, 3)] * 4]
    assert backend.samplings == [Sampling()]


@pytest.mark.parametrize(
    ("options", "ending", "text", "n_generated", "n_past"),
    [
        ({"n_predict": 3}, "length", "hel", 3, 7),
        ({"n_predict": 0}, "length", "", 0, 5),
        ({"n_predict": 9, "stop": ["l"]}, "stop", "he", 3, 7),
        ({"n_predict": 9, "stop": ["lo", "x"]}, "stop", "hel", 5, 9),
        ({"n_predict": 9, "stop": ["low"]}, "end", "hello", 5, 10),
        ({"n_predict": 4, "stop": ["low"]}, "length", "hell", 4, 8),
    ],
)
def test_how_a_turn_ends(options: dict[str, Any], ending: str, text: str, n_generated: int, n_past: int) -> None:
    result, _ = say(writer(ScriptedWriter(b"hello")), **options)
    assert (result.ending, result.text, result.n_generated, result.n_past) == (ending, text, n_generated, n_past)


@pytest.mark.parametrize(("n_ctx", "text"), [(5, "h"), (6, "he"), (9, "hello")])
def test_a_full_context_ends_a_turn(n_ctx: int, text: str) -> None:
    result, _ = say(writer(ScriptedWriter(b"hello world", n_ctx=n_ctx)))
    assert (result.ending, result.text, result.n_past) == ("context", text, n_ctx)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    backend = ScriptedWriter(n_ctx=9)
    generator = writer(backend)
    say(generator, "hi", n_predict=1)
    before, calls = list(backend.state), list(backend.calls)
    with pytest.raises(Refused, match=r"10 tokens.* holds 9"):
        generator.prepare(GenerateRequest(prompt="abc" * 2 + "x"))
    with pytest.raises(Refused, match="with what was said before"):
        generator.prepare(GenerateRequest(prompt="ab", clear_kv=False))
    assert (backend.state, backend.calls) == (before, calls)


def test_a_raw_prompt_has_no_template_and_no_history() -> None:
    backend = ScriptedWriter(b"lo", tags=("<t>", "</t>"))
    result, _ = say(writer(backend), "hel", template=False)
    assert backend.state == list(b"hello") and result.text == "lo"
    with pytest.raises(Refused, match="prompt is empty"):
        writer(backend).prepare(GenerateRequest(prompt="", template=False))


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_conversation_goes_on_from_what_the_state_holds(can_cut: bool) -> None:
    backend = ScriptedWriter(b"hello", can_cut=can_cut)
    generator = writer(backend)
    say(generator, "one", system="be brief")
    held = backend.position
    result, _ = say(generator, "two", clear_kv=False)
    assert backend.rendered == [("system", "be brief"), ("user", "one"), ("assistant", "hello"), ("user", "two")]
    assert result.n_reused == held and ("drop", 0) not in backend.calls[1:]
    again, _ = say(generator, "three", clear_kv=True)
    assert again.n_reused in (0, 1) and backend.rendered == [("user", "three")]


@pytest.mark.parametrize("can_cut", [True, False])
def test_what_the_history_lost_is_cut_off_or_computed_again(can_cut: bool) -> None:
    """Reasoning is not rendered again, so that the state holds what the prompt does not."""
    backend = ScriptedWriter(b"why</t>yes", can_cut=can_cut, tags=("<t>", "</t>"), opens=b"<t>")
    generator = writer(backend)
    first, _ = say(generator, "one", think=True)
    assert (first.text, first.reasoning) == ("yes", "why")
    second, _ = say(generator, "two", clear_kv=False)
    shared = len("uone") + 2  # the user's turn, its end, and what opens the assistant's
    assert second.n_reused == (shared if can_cut else 0)
    assert second.n_reused + second.n_prompt == len(backend.turn_prompt(backend.rendered, think=False).tokens)


def test_at_least_one_token_is_computed() -> None:
    backend = ScriptedWriter(b"")
    generator = writer(backend)
    say(generator, "one")
    turn = generator.prepare(GenerateRequest(prompt="x"))
    turn.prompt = type(turn.prompt)(tokens=list(backend.state), in_reasoning=False)
    turn.request = GenerateRequest(prompt="x", clear_kv=False)
    result = generator.generate(turn)
    assert result.n_prompt == 1 and result.n_reused == backend.position - 1


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize(("cancel_at", "text"), [(0, ""), (1, "h"), (3, "hel")])
def test_a_cancel_keeps_what_was_said_and_nothing_else(can_cut: bool, cancel_at: int, text: str) -> None:
    backend = ScriptedWriter(b"hello", can_cut=can_cut, cancel_at=cancel_at)
    generator = writer(backend)
    result, _ = say(generator, "one")
    assert (result.ending, result.cancelled, result.text) == ("cancelled", True, text)
    assert generator.conversation.tokens == backend.state
    assert result.n_past == backend.position
    say(generator, "two", clear_kv=False)
    past = [("user", "one"), ("assistant", text)] if text else []
    assert backend.rendered == [*past, ("user", "two")]


@pytest.mark.parametrize("n_predict", [0, 3])
def test_a_turn_that_said_nothing_is_remembered(n_predict: int) -> None:
    backend = ScriptedWriter(b"why</t>yes", tags=("<t>", "</t>"), opens=b"<t>")
    generator = writer(backend)
    first, _ = say(generator, "one", system="be brief", think=True, n_predict=n_predict)
    assert (first.ending, first.text) == ("length", "")
    say(generator, "two", clear_kv=False)
    assert backend.rendered == [("system", "be brief"), ("user", "one"), ("assistant", ""), ("user", "two")]


@pytest.mark.parametrize("n_predict", [3, 9])
def test_a_stop_string_in_what_was_held_back_is_one(n_predict: int) -> None:
    result, _ = say(writer(ScriptedWriter(b"<th", tags=("<think>", "</think>"))), n_predict=n_predict, stop=["<"])
    assert (result.ending, result.text) == ("stop", "")


def test_an_interrupt_leaves_no_wrong_idea_of_the_state() -> None:
    backend = ScriptedWriter(b"hello")
    generator = writer(backend)
    say(generator, "one")

    def interrupt() -> None:
        backend.state = backend.state[:3]
        raise KeyboardInterrupt

    backend.during_prefill = interrupt
    with pytest.raises(KeyboardInterrupt):
        say(generator, "two", clear_kv=False)
    backend.during_prefill = lambda: None
    result, _ = say(generator, "two", clear_kv=False)
    assert result.n_reused == 0
    assert backend.state[: result.n_prompt] == backend.turn_prompt(backend.rendered, think=False).tokens


def test_a_control_token_is_not_shown() -> None:
    result, steps = say(writer(ScriptedWriter([*b"a", TOOL, *b"b"])))
    assert (result.text, result.n_generated) == ("ab", 3)
    assert [step.delta_text for step in steps] == ["a", "", "b"]


def test_characters_come_whole_and_the_broken_ones_replaced() -> None:
    result, steps = say(writer(ScriptedWriter("é👍".encode() + b"\xf0\x9f")))
    assert [step.delta_text for step in steps] == ["", "é", "", "", "", "👍", "", "", "�"]
    assert result.text == "é👍�" and steps[-1].step == steps[-2].step == 8


def test_what_on_step_raises_ends_the_turn_unremembered() -> None:
    backend = ScriptedWriter(b"hello")
    generator = writer(backend)

    def fail(step: Step) -> None:
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody"):
        generator.generate(generator.prepare(GenerateRequest(prompt="one")), fail)
    assert generator.conversation.messages == []
    assert generator.conversation.tokens == backend.state


def test_what_was_read_is_told_of_the_prompt_of_each_token_and_of_all() -> None:
    backend = ScriptedWriter(b"hello")
    backend.reads = {"read_bytes": MIB, "routed_bytes": 2 * MIB, "ahead_bytes": MIB, "wasted_bytes": MIB // 2}
    backend.reads |= {"n_hits": 1, "n_misses": 3, "io_s": 0.5, "stall_s": 0.25, "mgmt_s": 0.125}
    backend.reads |= {"dev_tokens": 64, "dev_read_bytes": 7 * MIB, "dev_stall_s": 0.75}
    backend.reads |= {"dev_routed": 9, "dev_demand": 4, "dev_nodes": 50}
    backend.cache_resident_mib, backend.cache_budget_mib = 7.0, 9.0
    result, steps = say(writer(backend), n_predict=20)
    prefill = [result.prefill_read_mib, result.prefill_routed_mib, result.prefill_ahead_mib, result.prefill_wasted_mib]
    assert prefill == [1.0, 2.0, 1.0, 0.5]
    assert (result.prefill_io_s, result.prefill_stall_s, result.prefill_mgmt_s) == (0.5, 0.25, 0.125)
    device = (result.prefill_dev_tokens, result.prefill_dev_read_mib, result.prefill_dev_stall_s)
    assert device == (64, 7.0, 0.75)
    assert (result.prefill_dev_routed, result.prefill_dev_demand, result.prefill_dev_nodes) == (9, 4, 50)
    assert [result.read_mib, result.routed_mib, result.ahead_mib, result.wasted_mib] == [5.0, 10.0, 5.0, 2.5]
    assert (result.io_s, result.stall_s, result.mgmt_s) == (2.5, 1.25, 0.625)
    assert result.prefill_cache_hit_pct == result.cache_hit_pct == 25.0
    assert (result.cache_resident_mib, result.cache_budget_mib) == (7.0, 9.0)
    told = [(step.read_bytes, step.io_s, step.stall_s, step.mgmt_s, step.cache_hit_pct) for step in steps]
    assert told == [(0, 0.0, 0.0, 0.0, 0.0), *[(MIB, 0.5, 0.25, 0.125, 25.0)] * 4]
