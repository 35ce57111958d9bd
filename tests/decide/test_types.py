from typing import Any

import pytest

from bmoe.decide import DecideRequest, Refused

GOOD: dict[str, Any] = {"prefix": "p", "suffix": "s", "choices": ("A", "B")}


def test_a_list_of_choices_becomes_a_tuple() -> None:
    assert DecideRequest(**GOOD | {"choices": ["A", "B"]}).choices == ("A", "B")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prefix", b"p", "prefix must be text, not a value of type bytes"),
        ("prefix", None, "prefix must be text, not null"),
        ("suffix", 1, "suffix must be text, not the number 1"),
        ("suffix", True, "suffix must be text, not true"),
        ("system", ["x"], "system must be text, not a list"),
        ("reuse_prefix", 1, "reuse_prefix must be true or false, not the number 1"),
        ("template", "no", "template must be true or false, not a text"),
        ("template", None, "template must be true or false, not null"),
        ("choices", "AB", "choices must be a list of texts, not a text"),
        ("choices", None, "choices must be a list of texts, not null"),
        ("choices", {"A": 1}, "choices must be a list of texts"),
        ("choices", [1, 2], r"choices\[0\] must be text, not the number 1"),
        ("choices", ["A", b"B"], r"choices\[1\] must be text"),
        ("choices", ["A", float("nan")], r"choices\[1\] must be text, not the number nan"),
    ],
)
def test_a_wrong_type_is_refused_by_name(field: str, value: object, says: str) -> None:
    with pytest.raises(Refused, match=says):
        DecideRequest(**GOOD | {field: value})


@pytest.mark.parametrize("field", ["prefix", "suffix", "system"])
def test_half_a_surrogate_pair_is_refused_by_name(field: str) -> None:
    with pytest.raises(Refused, match=rf"{field} holds U\+D83D at character 2"):
        DecideRequest(**GOOD | {field: "ab\ud83d"})


def test_half_a_surrogate_pair_in_a_choice_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"choices\[1\] holds U\+DC4D at character 0"):
        DecideRequest(**GOOD | {"choices": ("A", "\udc4d")})


def test_a_zero_byte_is_text() -> None:
    request = DecideRequest(prefix="before\0after", suffix="\0", choices=("\0", "A"), system="\0")
    assert len(request.prefix) == 12


def test_a_system_message_needs_the_template() -> None:
    with pytest.raises(Refused, match="system needs the chat template"):
        DecideRequest(**GOOD, system="x", template=False)
