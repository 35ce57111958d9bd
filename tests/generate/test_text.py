"""From bytes to what is shown: however they come, the same text, and never half a character."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.generate.text import Characters, Delta, Reasoning, Stops, TurnText, overlap

TAGS = ("<think>", "</think>")


def through(text: TurnText, pieces: Sequence[bytes]) -> tuple[str, str]:
    deltas = [text.feed(piece, control=False) for piece in pieces]
    deltas.append(text.flush())
    shown = "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)
    assert shown == (text.text, text.reasoning)
    return shown


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@given(st.binary(max_size=40), st.lists(st.integers(0, 100), max_size=8))
def test_any_bytes_in_any_pieces_are_the_same_text(data: bytes, places: list[int]) -> None:
    whole, parts = Characters(), Characters()
    pieces = [parts.feed(piece) for piece in cut(data, places)]
    assert "".join(pieces) + parts.flush() == whole.feed(data) + whole.flush() == data.decode("utf-8", "replace")


def test_a_character_is_never_cut() -> None:
    characters = Characters()
    family = "👨‍👩‍👧é"
    shown = [characters.feed(bytes([byte])) for byte in family.encode()]
    assert "".join(shown) == family
    assert {len(piece) for piece in shown} == {0, 1}


@given(
    st.text(alphabet="ab<>/think \n", max_size=30),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
    st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), max_size=2),
)
def test_any_cut_shows_the_same(text: str, places: list[int], inside: bool, stops: list[str]) -> None:
    whole = through(TurnText(TAGS, in_reasoning=inside, stops=stops), [text.encode()])
    parts = through(TurnText(TAGS, in_reasoning=inside, stops=stops), cut(text.encode(), places))
    assert whole == parts


@pytest.mark.parametrize(
    ("written", "inside", "text", "reasoning"),
    [
        ("plain answer", False, "plain answer", ""),
        ("<think>\nbecause\n</think>\n\nYes", False, "Yes", "because\n"),
        ("\n<think>a</think>b", False, "b", "a"),
        ("\nbecause\n</think>\n\nYes", True, "Yes", "because\n"),
        ("<think>never closed", False, "", "never closed"),
        ("cut </thi", True, "", "cut </thi"),
        ("<thi", False, "<thi", ""),
        ("  indented", False, "  indented", ""),
        ("a <think> inside an answer", False, "a <think> inside an answer", ""),
        ("x</think>y</think>z", True, "y</think>z", "x"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(written: str, inside: bool, text: str, reasoning: str) -> None:
    one_by_one = [character.encode() for character in written]
    assert through(TurnText(TAGS, in_reasoning=inside, stops=()), one_by_one) == (text, reasoning)


def test_without_tags_everything_is_the_answer() -> None:
    reasoning = Reasoning(("", ""), inside=True)
    assert reasoning.feed("  <think>x") == Delta(text="  <think>x")
    assert Reasoning(("<think>", ""), inside=False).feed("<think>x") == Delta(text="<think>x")


def test_the_text_ends_before_the_first_stop_string() -> None:
    stops = Stops(("END", "\n\n"))
    assert [stops.feed(piece) for piece in ("one ", "E", "N", "x EN", "D two", " three")][:5] == [
        "one ", "", "", "ENx ", "",
    ]  # fmt: skip
    assert stops.found
    first = Stops(("abc", "b", "ab"))
    assert first.feed("xabc") == "x" and first.found  # "b" and "ab" are complete at once: the longer one
    none = Stops(("END",))
    assert none.feed("the EN") == "the " and none.flush() == "EN" and not none.found


def test_what_follows_a_stop_string_is_not_shown() -> None:
    text = TurnText(TAGS, in_reasoning=False, stops=("!",))
    assert text.feed(b"yes! no", control=False) == Delta(text="yes")
    assert text.stopped
    assert text.feed(b"more", control=False) == Delta() == text.flush()
    assert text.text == "yes"


def test_a_stop_string_counts_in_the_answer_only() -> None:
    text = TurnText(TAGS, in_reasoning=True, stops=("!",))
    assert through(text, [b"wait! ", b"</think>", b"ok! no"]) == ("ok", "wait! ")


def test_control_tokens_are_shown_nowhere_but_are_tags() -> None:
    text = TurnText(("<|a|>think<|b|>", "<|c|>"), in_reasoning=False, stops=())
    for piece, control in [
        (b"<|a|>", True),
        (b"think", False),
        (b"<|b|>", True),
        (b"hm", False),
        (b"<|tool|>", True),
        (b"<|c|>", True),
        (b"yes", False),
        (b"<|tool|>", True),
    ]:
        text.feed(piece, control=control)
    text.flush()
    assert (text.text, text.reasoning) == ("yes", "hm")


@pytest.mark.parametrize(
    ("text", "ends", "wanted"),
    [
        ("abEN", ["END"], 2),
        ("abEND", ["END"], 0),
        ("ab", ["END"], 0),
        ("aba", ["abab"], 3),
        ("", ["x"], 0),
        ("x", [], 0),
    ],
)
def test_overlap(text: str, ends: list[str], wanted: int) -> None:
    assert overlap(text, ends) == wanted
