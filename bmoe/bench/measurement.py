"""All of it in one run, for another one's machine may be a busier one."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bmoe.bench import caching
from bmoe.bench.bandwidth import Probe, probe
from bmoe.bench.decisions import Made, Opened, decided, floor, streamed_floors
from bmoe.bench.expert_ranges import Request, expert_requests, shards
from bmoe.bench.memory import LOG_INFO, AnonymousPeak, BufferLog, anonymous_bytes, cgroup_memory
from bmoe.bench.page_cache import drop_caches
from bmoe.bench.plan import OpenEngine, Plan, Stage
from bmoe.bench.prompts import Prompt, pairs, refuse_longer, runs
from bmoe.bench.report import Cached, Floor, Memory, Report
from bmoe.bench.stock import Stock, compared
from bmoe.decide import Refused
from bmoe_native import Engine
from bmoe_native.types import DEFAULT_IO_THREADS, Info, Streaming


def measure(
    path: Path,
    plan: Plan,
    *,
    open_engine: OpenEngine = Engine.open,
    on_stage: Stage = lambda text: None,
    on_repetition: Stage = lambda text: None,
) -> Report:
    """Decide, and measure what bounds it.

    Raises: Refused, EngineError, OSError.
    """
    if plan.drop_caches:
        drop_caches()
    measurement = _Measurement(path, plan, open_engine, on_stage)
    prepared = measurement.prepared()
    # First, while this process holds next to nothing.
    stock = None
    if plan.stock and plan.streaming is not None:
        stock = measurement.stock(plan.streaming, prepared, on_repetition)
    probes = measurement.probes(prepared.requests)
    with AnonymousPeak() as peak:
        info, made, floors = measurement.decisions(prepared.runs)
    cgroup_bytes, cgroup_limit_bytes = cgroup_memory()
    probes += measurement.probes(prepared.requests)
    cached: list[Cached] = []
    if plan.streaming is not None and info.is_streamed:
        floors = measurement.floors(plan.streaming, made)
        cached = measurement.cached(plan.streaming, [prompts[0] for prompts in prepared.runs])
    bandwidth = max((one.bytes_per_s for one in probes), default=math.inf)
    return Report(
        info=info,
        plan=plan,
        probes=tuple(probes),
        decisions=tuple(one.decision(floor, bandwidth) for one, floor in zip(made, floors, strict=True)),
        memory=Memory(anonymous_bytes=peak.n_bytes, cgroup_bytes=cgroup_bytes, cgroup_limit_bytes=cgroup_limit_bytes),
        cached=tuple(cached),
        stock=stock,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is known of a model before any of its weights is read."""

    paths: list[Path]  # all of its files
    runs: list[list[Prompt]]
    pairs: list[tuple[Prompt, Prompt]]  # to compare with
    requests: list[Request]  # what may be read of experts: nothing where nothing streams


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The steps of a measurement, and what all of them need."""

    path: Path
    plan: Plan
    open_engine: OpenEngine
    on_stage: Stage

    def opened(self, streaming: Streaming | None, *, repack: bool | None = None, **hooks: Any) -> Engine:
        self.on_stage(f"opening {self.path.name}")
        plan = self.plan
        repack = plan.repack if repack is None else repack
        return self.open_engine(self.path, streaming=streaming, repack=repack, **plan.engine_options, **hooks)

    def prepared(self) -> _Prepared:
        """Raises: Refused, EngineError."""
        plan = self.plan
        with self.open_engine(self.path, inspect=True) as engine:
            if plan.stock and not engine.info.experts_bytes:
                raise Refused("--stock: this model has no routed experts, so that nothing streams")
            paths = shards(self.path, engine.info.n_shards)
            return _Prepared(
                paths=paths,
                runs=list(runs(engine, plan)),
                pairs=list(pairs(engine, plan)) if plan.stock else [],
                requests=expert_requests(paths) if plan.streaming is not None and engine.info.experts_bytes else [],
            )

    def stock(self, streaming: Streaming, prepared: _Prepared, on_repetition: Stage) -> Stock:
        with self.opened(replace(streaming, cache_bytes=-1)) as engine:
            refuse_longer([prompt for pair in prepared.pairs for prompt in pair], engine.n_ctx)
            fits = has_room(engine.info)
        return compared(
            prepared.paths, self.plan, prepared.pairs, fits=fits, on_stage=self.on_stage, on_repetition=on_repetition
        )

    def probes(self, requests: Sequence[Request]) -> list[Probe]:
        streaming = self.plan.streaming
        if streaming is None or not requests:
            return []
        self.on_stage("reading experts at random")
        n_threads = streaming.io_threads or DEFAULT_IO_THREADS
        return [probe(requests, n_threads=n_threads, direct=streaming.direct, for_s=self.plan.probe_s)]

    def decisions(self, runs: Sequence[Sequence[Prompt]]) -> tuple[Info, list[Made], list[Floor]]:
        """The floors are those of a model that does not stream, which has everything in memory as it is."""
        infos: list[Info] = []
        made: list[Made] = []
        floors: list[Floor] = []
        for prompts in runs:
            if self.plan.drop_caches:
                drop_caches()
            log, before = BufferLog(), anonymous_bytes()
            began = time.perf_counter()
            with self.opened(self.plan.streaming, on_log=log, log_level=LOG_INFO) as engine:
                open_s = time.perf_counter() - began
                bound = log.bound(engine.info.cache_bytes, _unmapped_bytes(engine.info, self.plan.streaming))
                opened = Opened(s=open_s, anonymous_before_bytes=before, bound=bound)
                infos.append(engine.info)
                made += decided(engine, prompts, opened, self.on_stage)
                if not engine.info.is_streamed:
                    floors += [floor(engine, one, self.on_stage) for one in made[-len(prompts) :]]
        return infos[0], made, floors

    def floors(self, streaming: Streaming, made: Sequence[Made]) -> list[Floor]:
        """Without guesses, so that a prompt's experts and no others come to memory; auto, for what it has room for."""
        with self.opened(replace(streaming, cache_bytes=-1, prefetch="off")) as engine:
            return list(streamed_floors(engine, made, self.on_stage))

    def cached(self, streaming: Streaming, prompts: Sequence[Prompt]) -> list[Cached]:
        """Nothing is put into another layout: streamed experts never are, and kernels differ by it."""
        with self.opened(replace(streaming, cache_bytes=-1), repack=False) as streamed:
            if not has_room(streamed.info):
                return [Cached(name=prompt.name, unmeasured_because=caching.NO_ROOM) for prompt in prompts]
            with self.opened(None, repack=False) as resident:
                return list(caching.beside_resident(streamed, resident, prompts, self.on_stage))


def has_room(info: Info) -> bool:
    """Whether an engine that was to choose for itself found room for all experts."""
    return info.cache_bytes >= info.streamed_bytes


def _unmapped_bytes(info: Info, streaming: Streaming | None) -> int:
    """Of weights that do not stream and were read into the process's memory rather than mapped."""
    anonymous = streaming is not None and info.is_streamed and streaming.dense == "anon"
    return info.weights_bytes - info.streamed_bytes if anonymous else 0
