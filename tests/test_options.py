import zlib
from string import ascii_lowercase, ascii_uppercase

import pytest

from bmoe.decide import Refused
from bmoe.options import lettered, single_token_labels


def characters(text: str) -> list[int]:
    """One token a character: no label is longer than that."""
    return [ord(letter) for letter in text]


def words(text: str) -> list[int]:
    """One token a word, whatever it is."""
    return [zlib.crc32(text.encode())]


def test_a_question_is_the_prefix_and_its_options_the_suffix() -> None:
    request = lettered("Which team?", ["billing", "sales"], characters)
    assert request.prefix == "Which team?"
    assert "A. billing\nB. sales" in request.suffix
    assert request.choices == ("A", "B")


def test_without_a_template_the_labels_follow_a_blank() -> None:
    request = lettered("Which?", ["x", "y"], words, template=False)
    assert request.suffix.endswith("Answer:")
    assert request.choices == (" A", " B")
    assert not request.template


def test_where_the_tokenizer_puts_the_blank_itself_the_labels_have_none() -> None:
    assert lettered("Which?", ["x", "y"], characters, template=False).choices == ("A", "B")


def test_the_alphabet_comes_first() -> None:
    assert single_token_labels(26, characters) == tuple(ascii_uppercase)
    assert single_token_labels(26, words) == tuple(ascii_uppercase)


@pytest.mark.parametrize("count", [27, 60, 300, 2000])
def test_many_options_get_labels_that_are_all_different(count: int) -> None:
    labels = single_token_labels(count, words)
    assert len({words(label)[0] for label in labels}) == count


def test_a_label_of_two_tokens_is_passed_over() -> None:
    labels = single_token_labels(30, lambda text: words(text) + [0] * (len(text) - 1))
    assert labels == (*ascii_uppercase, *ascii_lowercase[:4])


def test_labels_that_are_the_same_token_are_given_once() -> None:
    def pairs(text: str) -> list[int]:
        return [ord(text) // 2] if len(text) == 1 else [0, 0]

    labels = single_token_labels(13, pairs)
    assert len({ord(label) // 2 for label in labels}) == 13


def test_more_options_than_labels_are_refused_with_both_numbers() -> None:
    with pytest.raises(Refused, match="53 options are more than the 52 single-token labels"):
        lettered("q", ["x"] * 53, characters)


@pytest.mark.parametrize(
    ("question", "options", "says"),
    [
        ("q", [], "options is empty"),
        ("q", ["x", " \n"], r"options\[1\] is blank"),
        ("q", "AB", "options must be a list of texts, not a text"),
        ("q", [1], r"options\[0\] must be text"),
        (None, ["x"], "question must be text, not null"),
    ],
)
def test_wrong_types_are_refused_by_name(question: str, options: list[str], says: str) -> None:
    with pytest.raises(Refused, match=says):
        lettered(question, options, words)
