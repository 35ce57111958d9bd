"""Streaming beside the stock way: the same model mapped, as llama.cpp opens it, and left to the page cache.

There are two stock ways. llama.cpp's default puts weights of some types into another layout as it loads them, in memory
that cannot be dropped and read again; with that turned off all of them stay mapped. Both are measured where both can
be, and the quicker one counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median

from bmoe.bench.page_cache import forget
from bmoe.bench.plan import Plan, Stage
from bmoe.bench.prompts import Prompt
from bmoe.bench.repetition import Job, Repetition, Unfinished, repetition

STREAMED, MAPPED, REPACKED = "streamed", "mapped", "repacked"
TIMES = ("answer_s", "answer_without_imports_s", "warm_s")
NO_ROOM = "its weights do not fit into memory, and a copy of them is made"
Run = Callable[[Job], Repetition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of holding a model, and what came of it."""

    name: str
    repetitions: tuple[Repetition, ...] = ()
    unmeasured_because: str = ""

    def median_s(self, time: str) -> float | None:
        """Of one of TIMES."""
        return None if self.unmeasured_because else median(map(attrgetter(time), self.repetitions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of one pair of prompts: the first answer, and the one after it."""

    names: tuple[str, str]
    n_tokens: tuple[int, int]
    ways: tuple[Way, ...]  # streamed first

    def quicker(self, time: str) -> Way | None:
        """The stock way that takes less of one of TIMES; None where none can be measured."""
        measured = [way for way in self.ways[1:] if not way.unmeasured_because]
        return min(measured, key=lambda way: way.median_s(time) or 0.0, default=None)

    def ratio(self, time: str) -> float | None:
        """The quicker stock way's to the streamed one's, of medians: above 1 streaming is quicker."""
        way, streamed_s = self.quicker(time), self.ways[0].median_s(time)
        stock_s = way.median_s(time) if way else None
        return stock_s / streamed_s if stock_s and streamed_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    page_cache: str  # how it was emptied before each process: see forget()
    comparisons: tuple[Comparison, ...]


def compared(
    paths: Sequence[Path],
    plan: Plan,
    pairs: Sequence[tuple[Prompt, Prompt]],
    *,
    fits: bool,
    on_stage: Stage,
    on_repetition: Stage,
    run: Run = repetition,
    forget: Callable[[Sequence[Path]], str] = forget,
) -> Stock:
    """Processes of each way in turn, each with a cold page cache.

    paths: of the model, the first of them to be opened. fits: whether all of it does into memory.

    Raises: OSError, where the streamed one gives no answer.
    """
    how = ""
    comparisons = []
    for first, second in pairs:
        found: dict[str, list[Repetition]] = {STREAMED: [], MAPPED: [], REPACKED: []}
        failed = {} if fits else {REPACKED: NO_ROOM}
        for number in range(1, plan.repeat + 1):
            for way, repetitions in found.items():
                if way in failed:
                    continue
                what = f"{first.name}, {way}, {number} of {plan.repeat}"
                on_stage(f"a process of its own: {what}")
                how = forget(paths)
                try:
                    one = run(_job(paths[0], plan, way, first, second))
                except Unfinished as error:
                    if way == STREAMED:
                        raise ChildProcessError(f"{what}: {error}") from error
                    failed[way] = str(error)
                    on_repetition(f"{what}: {error}")
                    continue
                repetitions.append(one)
                on_repetition(f"{what}: first answer after {one.answer_s:.2f} s, a warm one in {one.warm_s:.2f} s")
        ways = tuple(
            Way(name=way, repetitions=tuple(repetitions), unmeasured_because=failed.get(way, ""))
            for way, repetitions in found.items()
        )
        lengths = (len(first.tokens), len(second.tokens))
        comparisons.append(Comparison(names=(first.name, second.name), n_tokens=lengths, ways=ways))
    return Stock(page_cache=how, comparisons=tuple(comparisons))


def _job(path: Path, plan: Plan, way: str, first: Prompt, second: Prompt) -> Job:
    return Job(
        path=path,
        streaming=plan.streaming if way == STREAMED else None,
        repack=plan.repack if way == STREAMED else way == REPACKED,
        options=plan.engine_options,
        first=first.tokens,
        second=second.tokens,
    )
