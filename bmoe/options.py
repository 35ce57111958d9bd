"""A question with options, as a decision between labels."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from string import ascii_lowercase, ascii_uppercase

from bmoe.decide.types import DecideRequest, Refused, check_text, checked_texts

Tokenize = Callable[[str], Sequence[int]]
"""Text alone to tokens: no template, no BOS."""


def lettered(
    question: str,
    options: Sequence[str],
    tokenize: Tokenize,
    *,
    reuse_prefix: bool = True,
    system: str | None = None,
    template: bool = True,
) -> DecideRequest:
    """The question as the prefix, the labelled options as the suffix, the labels as the choices.

    Raises: Refused, for values of a wrong type, no options, a blank one, and more options than there are labels.
    """
    check_text("question", question)
    texts = checked_texts("options", options)
    if not texts:
        raise Refused("options is empty: there is nothing to decide between")
    for index, text in enumerate(texts):
        if not text.strip():
            raise Refused(f"options[{index}] is blank: an answer needs a text to be chosen by")
    # Without a template the answer continues the line "Answer:", and a model writes a blank there, as part of the
    # label's token. Where that is no single token, the tokenizer puts the blank before every text itself.
    lead = " " if not template and len(tokenize(" A")) == 1 else ""
    labels = single_token_labels(len(texts), lambda label: tokenize(lead + label))
    lines = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    # Of the wordings tried on the default model, the one that was right most often: docs/decide.md.
    ask = "Which letter is it? Answer with the letter only." if template else "Answer:"
    return DecideRequest(
        prefix=question,
        suffix=f"\n\nOptions:\n{lines}\n\n{ask}",
        choices=tuple(lead + label for label in labels),
        reuse_prefix=reuse_prefix,
        system=system,
        template=template,
    )


def single_token_labels(count: int, tokenize: Tokenize) -> tuple[str, ...]:
    """Labels that are one token each, all of them different: A to Z, then what else the vocabulary offers.

    Raises: Refused, naming how many there are, where count is more.
    """
    labels: list[str] = []
    taken: set[int] = set()
    for label in _candidates():
        if len(labels) == count:
            break
        tokens = tokenize(label)
        if len(tokens) == 1 and tokens[0] not in taken:
            taken.add(tokens[0])
            labels.append(label)
    if len(labels) < count:
        raise Refused(
            f"{count} options are more than the {len(labels)} single-token labels this model's vocabulary has: "
            "ask in groups, or pass choices that differ in their first token"
        )
    return tuple(labels)


def _candidates() -> Iterator[str]:
    yield from ascii_uppercase
    for length in (2, 3):
        yield from map("".join, product(ascii_uppercase, repeat=length))
    yield from ascii_lowercase
    yield from map("".join, product(ascii_lowercase, repeat=2))
