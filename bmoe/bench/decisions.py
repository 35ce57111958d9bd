"""Decisions as they are timed, and the floor that computing alone would be."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bmoe.bench.memory import AnonymousPeak, Bound
from bmoe.bench.plan import Stage
from bmoe.bench.prompts import Prompt, refuse_longer
from bmoe.bench.report import Decision, Floor
from bmoe_native import Engine, PrefillResult

FLOOR_RUNS = 2  # of each prompt with everything in memory; the faster one is its floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What was to be known of an engine when it had been opened."""

    s: float
    anonymous_before_bytes: int | None
    bound: Bound | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A decision before its floors are known."""

    prompt: Prompt
    is_cold: bool
    opened: Opened
    cache_bytes: int
    wall_s: float
    spent: PrefillResult
    peak_anonymous_bytes: int | None

    def decision(self, floor: Floor, bytes_per_s: float) -> Decision:
        spent = self.spent
        n_asked = spent.n_hits + spent.n_misses
        missing = spent.routed_bytes * spent.n_misses / n_asked if n_asked else 0.0
        return Decision(
            name=self.prompt.name,
            is_cold=self.is_cold,
            open_s=self.opened.s,
            cache_bytes=self.cache_bytes,
            wall_s=self.wall_s,
            spent=spent,
            peak_anonymous_bytes=self.peak_anonymous_bytes,
            anonymous_before_bytes=self.opened.anonymous_before_bytes,
            bound=self.opened.bound,
            missing_bytes=missing,
            io_floor_s=missing / bytes_per_s if missing else 0.0,
            compute_floor=floor,
        )


def decided(engine: Engine, prompts: Sequence[Prompt], opened: Opened, on_stage: Stage) -> Iterator[Made]:
    """Each in turn. Raises: Refused, EngineError."""
    refuse_longer(prompts, engine.n_ctx)
    for index, prompt in enumerate(prompts):
        on_stage(f"deciding: {prompt.name}")
        with AnonymousPeak() as peak:
            wall_s, spent = timed(engine, prompt.tokens)
        yield Made(
            prompt=prompt,
            is_cold=index == 0,
            opened=opened,
            cache_bytes=engine.info.cache_bytes,
            wall_s=wall_s,
            spent=spent,
            peak_anonymous_bytes=peak.n_bytes,
        )


def timed(engine: Engine, tokens: Sequence[int]) -> tuple[float, PrefillResult]:
    """Wall seconds of a decision, and what was spent in it."""
    began = time.perf_counter()
    engine.drop_state()
    spent = engine.prefill(tokens)
    engine.logits()
    return time.perf_counter() - began, spent


def streamed_floors(engine: Engine, made: Sequence[Made], on_stage: Stage) -> Iterator[Floor]:
    """The floor of each decision whose experts fit in memory together, and an estimate of the others'."""
    room = engine.info.cache_bytes
    for one in made:
        if one.spent.routed_bytes > room:
            yield _estimated(engine, one, "its experts do not fit in memory together")
            continue
        engine.set_cache(0)
        engine.set_cache(engine.info.streamed_bytes)
        on_stage(f"reading its experts: {one.prompt.name}")
        timed(engine, one.prompt.tokens)
        yield floor(engine, one, on_stage)


def floor(engine: Engine, made: Made, on_stage: Stage) -> Floor:
    """The fastest of a few runs of a prompt that was computed before, so that everything is in memory."""
    on_stage(f"computing it from memory: {made.prompt.name}")
    runs = [timed(engine, made.prompt.tokens) for _ in range(FLOOR_RUNS)]
    wall_s, spent = min(runs, key=lambda run: run[0])
    if spent.n_misses or spent.n_major_faults:
        return _estimated(engine, made, "weights went out of memory again")
    return Floor(s=wall_s)


def _estimated(engine: Engine, made: Made, reason: str) -> Floor:
    """CPU seconds hold no waiting. Wall less stalls would hold what no one counted as one, and praise the decision."""
    return Floor(s=made.spent.prefill_cpu_s / engine.info.n_threads, estimated_because=reason)
