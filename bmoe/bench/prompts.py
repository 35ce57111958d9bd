"""What is decided: made-up screens of an app, or texts."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bmoe.bench.plan import Plan
from bmoe.decide import Refused
from bmoe_native import Engine


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    tokens: list[int]


def runs(engine: Engine, plan: Plan) -> Iterator[list[Prompt]]:
    """The prompts of each engine. Raises: Refused."""
    if plan.texts:
        yield _texts(engine, plan)
    for length in plan.lengths:
        yield [_made(engine, length, number) for number in range(plan.repeat)]


def pairs(engine: Engine, plan: Plan) -> Iterator[tuple[Prompt, Prompt]]:
    """What is answered first and what is after it, for each comparison. Raises: Refused."""
    texts = _texts(engine, plan)
    yield from zip(texts[::2], texts[1::2], strict=True)
    for length in plan.lengths:
        yield _made(engine, length, 0), _made(engine, length, 1)


def refuse_longer(prompts: Sequence[Prompt], n_ctx: int) -> None:
    """Raises: Refused, for a prompt that the context has no room for."""
    for prompt in prompts:
        if len(prompt.tokens) > n_ctx:
            raise Refused(f"{prompt.name} has {len(prompt.tokens)} tokens, and the context room for {n_ctx}")


def _texts(engine: Engine, plan: Plan) -> list[Prompt]:
    return [Prompt(name, _text_tokens(engine, name, text, plan.template)) for name, text in plan.texts]


def _made(engine: Engine, length: int, number: int) -> Prompt:
    return Prompt(f"{length}/{number}", made_tokens(engine, length, number))


def _text_tokens(engine: Engine, name: str, text: str, template: bool) -> list[int]:
    templated = template and engine.info.has_template
    tokens = engine.chat_tokens([("user", text)]) if templated else engine.text_tokens(text, add_bos=True)
    if not tokens:
        raise Refused(f"{name} holds no text")
    return tokens


def made_tokens(engine: Engine, length: int, number: int) -> list[int]:
    """The first `length` tokens of a made-up screen. Screens are alike as those of one app are, and none is another."""
    draw = random.Random(f"{length}/{number}")
    text = f"Screen {draw.randrange(10**6)}. "  # so that even the shortest differ
    text += "These elements are on the screen of the app. Which of them should be pressed next?\n"
    while len(tokens := engine.text_tokens(text, add_bos=True)) < length:
        for _ in range(1 + length // 10):
            kind = draw.choice(("button", "switch", "text field", "list item", "tab", "link", "icon"))
            verb = draw.choice(("Add", "Open", "Close", "Share", "Edit", "Save", "Remove", "Search", "Select", "Show"))
            thing = draw.choice(("account", "network", "message", "photo", "address", "order", "date", "note", "sound"))
            state = draw.choice(("enabled", "disabled", "checked", "hidden"))
            text += f"{kind} '{verb} {thing}' at {draw.randrange(1080)}, {draw.randrange(2400)}: {state}\n"
    return tokens[:length]
