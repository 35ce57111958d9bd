"""The comparison with the stock way: who runs when, with what, and what is made of it. No process is started."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bmoe import Refused, bench
from bmoe.bench import Comparison, Plan, Repetition, Stock, Way
from bmoe.bench.prompts import Prompt
from bmoe.bench.repetition import Job, Unfinished
from bmoe.bench.stock import NO_ROOM, compared
from bmoe_native.types import Streaming
from tests.bench.short import EVERYTHING, PROBE_S, measured

ONE = Repetition(
    imports_s=1.0,
    open_s=2.0,
    decision_s=3.0,
    answer_s=6.0,
    warm_s=2.0,
    cpu_s=4.0,
    n_major_faults=0,
    cache_mib=10.0,
    read_mib=20.0,
)
PATHS = [Path("m-00001-of-00002.gguf"), Path("m-00002-of-00002.gguf")]
PAIRS = [(Prompt("a", [1, 2]), Prompt("b", [3])), (Prompt("c", [4]), Prompt("d", [5]))]
PLAN = Plan(lengths=(1,), repeat=2, stock=True, streaming=Streaming(), n_ctx=77, n_expert_used=3)


def way_of(job: Job) -> str:
    return "streamed" if job.streaming else "repacked" if job.repack else "mapped"


def ran(
    answer: Callable[[Job], Repetition], *, plan: Plan = PLAN, fits: bool = True
) -> tuple[Stock, list[tuple[str, Any]], list[str]]:
    """What came of it, the page cache's and the processes' turns, and what was said of each."""
    turns: list[tuple[str, Any]] = []
    said: list[str] = []

    def run(job: Job) -> Repetition:
        turns.append((way_of(job), job))
        return answer(job)

    def forget(paths: Sequence[Path]) -> str:
        turns.append(("cold", paths))
        return "fadvise"

    stock = compared(
        PATHS, plan, PAIRS, fits=fits, on_stage=lambda text: None, on_repetition=said.append, run=run, forget=forget
    )
    return stock, turns, said


def comparison(**times: tuple[float, ...]) -> Comparison:
    ways = tuple(
        Way(name=name, repetitions=tuple(dataclasses.replace(ONE, warm_s=s) for s in seconds))
        if seconds
        else Way(name=name, unmeasured_because="why")
        for name, seconds in times.items()
    )
    return Comparison(names=("a", "b"), n_tokens=(2, 1), ways=ways)


class TestTurns:
    def test_they_alternate_and_each_begins_cold(self) -> None:
        stock, turns, said = ran(lambda job: ONE)
        a_pair = ["cold", "streamed", "cold", "mapped", "cold", "repacked"] * 2
        assert [what for what, _ in turns] == a_pair * 2
        assert all(value == PATHS for what, value in turns if what == "cold")
        assert stock.page_cache == "fadvise"
        assert [(one.names, one.n_tokens) for one in stock.comparisons] == [(("a", "b"), (2, 1)), (("c", "d"), (1, 1))]
        assert [len(way.repetitions) for one in stock.comparisons for way in one.ways] == [2] * 6
        assert said[0] == "a, streamed, 1 of 2: first answer after 6.00 s, a warm one in 2.00 s"
        assert len(said) == 12

    def test_all_are_given_the_same_but_for_how_weights_are_held(self) -> None:
        _, turns, _ = ran(lambda job: ONE)
        jobs = [job for what, job in turns[:6] if what != "cold"]
        assert [(job.streaming, job.repack) for job in jobs] == [(Streaming(), True), (None, False), (None, True)]
        assert {(job.path, tuple(job.first), tuple(job.second)) for job in jobs} == {(PATHS[0], (1, 2), (3,))}
        options = {"n_threads": 0, "n_ubatch": 0, "n_ctx": 77, "n_expert_used": 3}
        assert [job.options for job in jobs] == [options] * 3

    def test_the_streamed_one_alone_heeds_no_repack(self) -> None:
        _, turns, _ = ran(lambda job: ONE, plan=dataclasses.replace(PLAN, repack=False))
        assert [job.repack for what, job in turns[:6] if what != "cold"] == [False, False, True]

    def test_no_copy_is_made_where_there_is_no_room_for_one(self) -> None:
        stock, turns, _ = ran(lambda job: ONE, fits=False)
        assert "repacked" not in [what for what, _ in turns]
        assert [way.unmeasured_because for way in stock.comparisons[0].ways] == ["", "", NO_ROOM]

    def test_what_failed_is_not_tried_again_and_says_why(self) -> None:
        def failing(job: Job) -> Repetition:
            if way_of(job) == "mapped":
                raise Unfinished("killed by signal 9")
            return ONE

        stock, turns, said = ran(failing)
        assert [what for what, _ in turns].count("mapped") == len(PAIRS)
        mapped = stock.comparisons[0].ways[1]
        assert (mapped.unmeasured_because, mapped.median_s("warm_s")) == ("killed by signal 9", None)
        assert "a, mapped, 1 of 2: killed by signal 9" in said

    def test_without_a_streamed_answer_there_is_nothing_to_compare(self) -> None:
        def failing(job: Job) -> Repetition:
            raise Unfinished("no such file")

        with pytest.raises(OSError, match="a, streamed, 1 of 2: no such file"):
            ran(failing)


class TestRatio:
    def test_the_quicker_stock_way_by_its_median(self) -> None:
        one = comparison(streamed=(2.0, 1.0, 9.0), mapped=(5.0, 6.0, 100.0), repacked=(7.0, 8.0, 1.0))
        quicker = one.quicker("warm_s")
        assert quicker is not None and quicker.name == "mapped"
        assert one.ratio("warm_s") == 3.0
        assert one.ratio("answer_s") == 1.0

    def test_what_was_not_measured_is_not_the_quicker(self) -> None:
        one = comparison(streamed=(2.0,), mapped=(), repacked=(3.0,))
        assert one.ratio("warm_s") == 1.5
        assert comparison(streamed=(2.0,), mapped=(), repacked=()).ratio("warm_s") is None

    def test_imports_can_be_left_out(self) -> None:
        assert ONE.answer_without_imports_s == 5.0


class TestWhole:
    def test_processes_of_a_tiny_model(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bmoe.bench.stock.forget", lambda paths: "fadvise")
        plan = Plan(
            lengths=(20,), repeat=1, stock=True, streaming=Streaming(cache_bytes=0), probe_s=PROBE_S, n_expert_used=1
        )
        said: list[str] = []
        report = bench.measure(moe, plan, on_repetition=said.append)
        assert report.stock is not None
        (one,) = report.stock.comparisons
        assert (one.names, one.n_tokens) == (("20/0", "20/1"), (20, 20))
        assert [(way.name, len(way.repetitions)) for way in one.ways] == [
            ("streamed", 1),
            ("mapped", 1),
            ("repacked", 1),
        ]
        assert len(said) == 3
        assert len(report.decisions) == 1

    def test_it_is_off_unless_asked_for(self, moe: Path) -> None:
        assert measured(moe, lengths=(20,), repeat=1, streaming=EVERYTHING).stock is None

    def test_refusals(self, dense: Path) -> None:
        with pytest.raises(Refused, match="no routed experts"):
            measured(dense, lengths=(20,), stock=True, streaming=EVERYTHING)
        with pytest.raises(Refused, match="nothing to compare"):
            Plan(lengths=(1,), stock=True)
        with pytest.raises(Refused, match="in pairs"):
            Plan(texts=(("a", "b"),), stock=True, streaming=EVERYTHING)

    def test_a_second_prompt_that_is_too_long(self, moe: Path) -> None:
        texts = (("a", "one"), ("b", "two " * 600))
        with pytest.raises(Refused, match="b has"):
            measured(moe, texts=texts, stock=True, streaming=EVERYTHING)
