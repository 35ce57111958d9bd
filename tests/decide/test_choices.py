import pytest

from bmoe.decide import Refused
from bmoe.decide.choices import first_tokens
from tests.decide.scripted import ScriptedBackend


def test_each_choice_is_tokenized_alone_without_bos() -> None:
    backend = ScriptedBackend(bos=True)
    assert first_tokens(backend, ["Yes", "No way"]) == [
        backend.text_tokens("Yes", add_bos=False)[0],
        backend.text_tokens("No", add_bos=False)[0],
    ]


def test_no_choices_are_refused() -> None:
    with pytest.raises(Refused, match="choices is empty"):
        first_tokens(ScriptedBackend(), [])


def test_a_choice_without_a_token_is_refused_by_index() -> None:
    with pytest.raises(Refused, match=r"choices\[1\] '' has no token"):
        first_tokens(ScriptedBackend(), ["A", "", "B"])


@pytest.mark.parametrize(("one", "other"), [("A", "A "), ("Category A", "Category B"), ("A)", "A."), ("x", "x")])
def test_two_with_the_same_first_token_are_refused_with_both_and_the_token(one: str, other: str) -> None:
    backend = ScriptedBackend()
    token = backend.text_tokens(one, add_bos=False)[0]
    with pytest.raises(Refused) as refusal:
        first_tokens(backend, ["other", one, other])
    text = str(refusal.value)
    assert f"choices[1] {one!r}" in text
    assert f"choices[2] {other!r}" in text
    assert f"the token {backend.token_text(token)!r} (id {token})" in text


def test_a_long_choice_is_cut_in_the_message() -> None:
    with pytest.raises(Refused) as refusal:
        first_tokens(ScriptedBackend(), ["A " + "x" * 10_000, "A"])
    assert len(str(refusal.value)) < 500


def test_upper_and_lower_case_and_a_blank_are_different() -> None:
    assert len(set(first_tokens(ScriptedBackend(), ["Yes", "yes", " Yes", "YES"]))) == 4


def test_the_last_of_many_choices_is_checked_too() -> None:
    backend = ScriptedBackend()
    backend.text_tokens = lambda text, add_bos: [int(text)]  # type: ignore[method-assign,misc]
    many = [str(number) for number in range(3000)]
    assert first_tokens(backend, many) == list(range(3000))
    with pytest.raises(Refused, match=r"choices\[7\] '7' and choices\[3000\] '7'"):
        first_tokens(backend, [*many, "7"])
