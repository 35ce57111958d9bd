"""What is decided: lengths, names, templates, what is refused."""

from pathlib import Path

import pytest

from bmoe import Refused
from bmoe.bench import Plan
from bmoe.bench.prompts import made_tokens, pairs
from bmoe_native import Engine
from tests.bench.short import EVERYTHING, measured


class TestPrompts:
    def test_texts_go_through_the_template_as_decisions_do(self, dense: Path) -> None:
        with Engine.open(dense, inspect=True) as engine:
            templated = len(engine.chat_tokens([("user", "one two")]))
            plain = len(engine.text_tokens("one two", add_bos=True))
        (decision,) = measured(dense, texts=(("a", "one two"),)).decisions
        assert (decision.name, decision.spent.n_tokens) == ("a", templated)
        (decision,) = measured(dense, texts=(("a", "one two"),), template=False).decisions
        assert decision.spent.n_tokens == plain != templated

    def test_all_texts_are_one_run(self, moe: Path) -> None:
        texts = (("a", "one two"), ("b", "three"), ("c", "four"))
        report = measured(moe, texts=texts, streaming=EVERYTHING)
        assert [(one.name, one.is_cold) for one in report.decisions] == [("a", True), ("b", False), ("c", False)]

    def test_made_prompts_have_their_length_and_are_all_different(self, dense: Path) -> None:
        with Engine.open(dense, inspect=True) as engine:
            made = [made_tokens(engine, 400, number) for number in range(3)]
            assert made[0] == made_tokens(engine, 400, 0)
            assert made_tokens(engine, 1, 0) == made[0][:1]
        assert [len(tokens) for tokens in made] == [400] * 3
        assert len({tuple(tokens) for tokens in made}) == 3

    def test_refusals(self, dense: Path) -> None:
        with pytest.raises(Refused, match="513 tokens, and the context room for 512"):
            measured(dense, lengths=(513,), repeat=1)
        with pytest.raises(Refused, match="holds no text"):
            measured(dense, texts=(("empty", ""),), template=False)
        for wrong in ({}, {"lengths": (1,), "texts": (("a", "b"),)}, {"lengths": (0,)}, {"lengths": (1,), "repeat": 0}):
            with pytest.raises(Refused):
                Plan(**wrong)  # type: ignore[arg-type]

    def test_pairs_are_two_of_a_length_or_texts_in_their_order(self, dense: Path) -> None:
        texts = tuple((name, f"text of {name}") for name in "abcd")
        with Engine.open(dense, inspect=True) as engine:
            made = list(pairs(engine, Plan(lengths=(20, 30), repeat=1)))
            given = list(pairs(engine, Plan(texts=texts)))
        assert [[(one.name, len(one.tokens)) for one in pair] for pair in made] == [
            [("20/0", 20), ("20/1", 20)],
            [("30/0", 30), ("30/1", 30)],
        ]
        assert made[0][0].tokens != made[0][1].tokens
        assert [[one.name for one in pair] for pair in given] == [["a", "b"], ["c", "d"]]
