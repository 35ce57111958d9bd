"""The token each choice is scored by, and the choices that cannot be told apart by it."""

from collections.abc import Sequence

from bmoe.decide.backend import Backend
from bmoe.decide.types import Refused

SHOWN_CHARACTERS = 60


def first_tokens(backend: Backend, choices: Sequence[str]) -> list[int]:
    """The first token of each choice, tokenized alone: no template, no leading space, no BOS.

    Raises: Refused, for no choices, one without a token, and two that begin with the same token.
    """
    if not choices:
        raise Refused("choices is empty: there is nothing to decide between")
    owner: dict[int, int] = {}
    for index, choice in enumerate(choices):
        tokens = backend.text_tokens(choice, add_bos=False)
        if not tokens:
            raise Refused(f"choices[{index}] {shown(choice)} has no token to be scored by")
        other = owner.setdefault(tokens[0], index)
        if other != index:
            raise Refused(
                f"choices[{other}] {shown(choices[other])} and choices[{index}] {shown(choice)} both begin with "
                f"the token {shown(backend.token_text(tokens[0]))} (id {tokens[0]}), and a choice is scored by its "
                "first token: reword one of them, or use labels such as A, B, C"
            )
    return list(owner)


def shown(text: str) -> str:
    """Text in quotes for a message to people, cut where it is long."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")
