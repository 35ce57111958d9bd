"""What bmoe bench measures, on tiny models: that it is finite and adds up. No timing."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from bmoe import bench
from bmoe.bench import Plan, Report, caching, decisions, measurement
from bmoe_native import Engine, PrefillResult
from bmoe_native.types import Streaming
from tests.bench.short import EVERYTHING, PROBE_S, measured


def assert_adds_up(report: Report) -> None:
    for decision in report.decisions:
        spent = decision.spent
        seconds = (decision.open_s, decision.wall_s, decision.floor_s, decision.compute_floor.s, spent.prefill_cpu_s)
        assert all(math.isfinite(value) and value > 0 for value in seconds)
        assert decision.floor_s == max(decision.io_floor_s, decision.compute_floor.s)
        assert decision.wall_s >= spent.prefill_s
        assert 0 <= decision.missing_bytes <= spent.routed_bytes
        if decision.missing_bytes:
            assert report.bytes_per_s is not None
            assert decision.io_floor_s == pytest.approx(decision.missing_bytes / report.bytes_per_s)
        else:
            assert decision.io_floor_s == 0


class TestStreamed:
    def test_the_first_finds_nothing_and_the_others_what_it_left(self, moe: Path) -> None:
        report = measured(moe, lengths=(40, 90), repeat=2, streaming=EVERYTHING)
        assert_adds_up(report)
        names = [(one.name, one.is_cold, one.spent.n_tokens) for one in report.decisions]
        assert names == [("40/0", True, 40), ("40/1", False, 40), ("90/0", True, 90), ("90/1", False, 90)]
        for cold, warm in (report.decisions[:2], report.decisions[2:]):
            assert cold.spent.n_hits == 0
            assert cold.missing_bytes == cold.spent.routed_bytes > 0
            assert warm.spent.n_hits > 0
            assert warm.missing_bytes < warm.spent.routed_bytes

    def test_a_budget_of_nothing_misses_everything_every_time(self, moe: Path) -> None:
        report = measured(moe, lengths=(40,), repeat=3, streaming=Streaming(cache_bytes=0))
        assert_adds_up(report)
        assert [one.spent.n_hits for one in report.decisions] == [0, 0, 0]
        assert {one.cache_bytes for one in report.decisions} == {0}

    def test_the_probe_runs_before_and_after_as_the_engine_reads(self, moe: Path) -> None:
        report = measured(moe, lengths=(20,), repeat=1, streaming=Streaming(cache_bytes=0, io_threads=3, direct=False))
        assert [(probe.n_threads, probe.is_direct) for probe in report.probes] == [(3, False)] * 2
        assert report.bytes_per_s == max(probe.bytes_per_s for probe in report.probes)

    def test_the_compute_floor_is_of_a_prefill_that_misses_nothing(
        self, moe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[tuple[float, PrefillResult]] = []
        timed = decisions.timed

        def noted(engine: Engine, tokens: list[int]) -> tuple[float, PrefillResult]:
            run = timed(engine, tokens)
            runs.append((run[0], dataclasses.replace(run[1], n_major_faults=0)))
            return runs[-1]

        monkeypatch.setattr(decisions, "timed", noted)
        (decision,) = measured(moe, lengths=(40,), repeat=1, streaming=Streaming(cache_bytes=0)).decisions
        floors = runs[2 : 2 + decisions.FLOOR_RUNS]  # after those that decided and filled
        assert all(spent.n_misses == 0 and spent.routed_bytes > 0 for _, spent in floors)
        assert decision.compute_floor == bench.Floor(s=min(wall_s for wall_s, _ in floors))

    def test_where_there_is_no_room_the_floor_is_estimated_and_says_so(self, moe: Path) -> None:
        def crowded(path: Path, **options: Any) -> Engine:
            streaming = options.get("streaming")
            if streaming is not None and streaming.cache_bytes == -1:
                options["streaming"] = dataclasses.replace(streaming, cache_bytes=1)
            return Engine.open(path, **options)

        plan = Plan(lengths=(40,), repeat=1, streaming=EVERYTHING, probe_s=PROBE_S)
        report = bench.measure(moe, plan, open_engine=crowded)
        assert_adds_up(report)
        (decision,) = report.decisions
        assert "do not fit" in decision.compute_floor.estimated_because
        assert decision.compute_floor.s == decision.spent.prefill_cpu_s / report.info.n_threads
        assert [(one.unmeasured_because, one.ratio) for one in report.cached] == [(caching.NO_ROOM, None)]

    def test_what_went_out_of_memory_again_is_no_floor(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        timed = decisions.timed

        def faulting(engine: Engine, tokens: list[int]) -> tuple[float, PrefillResult]:
            wall_s, spent = timed(engine, tokens)
            return wall_s, dataclasses.replace(spent, n_major_faults=1)

        monkeypatch.setattr(decisions, "timed", faulting)
        report = measured(moe, lengths=(20,), repeat=1, streaming=EVERYTHING)
        (decision,) = report.decisions
        assert "out of memory" in decision.compute_floor.estimated_because
        assert [one.unmeasured_because for one in report.cached] == [caching.GONE]

    def test_what_it_keeps_is_no_more_than_its_bound(self, moe: Path) -> None:
        (decision,) = measured(moe, lengths=(20,), repeat=1, streaming=Streaming(cache_bytes=2**20)).decisions
        bound, peak, before = decision.bound, decision.peak_anonymous_bytes, decision.anonymous_before_bytes
        assert bound is not None and peak is not None and before is not None
        assert (bound.dense_bytes, bound.cache_bytes) == (0, 2**20)
        assert 0 < before <= peak
        assert decision.anonymous_ratio == peak / (2**20 + bound.buffers_bytes)

    def test_dense_weights_that_are_not_mapped_are_in_the_bound(self, moe: Path) -> None:
        streaming = Streaming(cache_bytes=0, dense="anon")
        report = measured(moe, lengths=(20,), repeat=1, streaming=streaming)
        (decision,) = report.decisions
        assert decision.bound is not None
        assert decision.bound.dense_bytes == report.info.weights_bytes - report.info.streamed_bytes > 0


class TestCached:
    def test_in_turn_with_the_model_in_memory_in_one_layout_with_everything_kept(self, moe: Path) -> None:
        opened: list[dict[str, Any]] = []
        engines: list[Engine] = []

        def noted(path: Path, **options: Any) -> Engine:
            opened.append(options)
            engines.append(Engine.open(path, **options))
            return engines[-1]

        plan = Plan(lengths=(20, 40), repeat=1, streaming=Streaming(cache_bytes=0), probe_s=PROBE_S, n_threads=1)
        report = bench.measure(moe, plan, open_engine=noted)
        streamed, resident = opened[-2:]
        assert (streamed["streaming"], resident["streaming"]) == (Streaming(cache_bytes=-1), None)
        assert (streamed["repack"], resident["repack"]) == (False, False)
        assert [one.name for one in report.cached] == ["20/0", "40/0"]
        for one in report.cached:
            assert len(one.streamed_s) == len(one.resident_s) > caching.ROUNDS // 2
            assert one.ratio is not None and 0 < one.ratio < math.inf

    def test_the_ratio_is_of_medians(self) -> None:
        cached = bench.Cached(name="a", streamed_s=(2.0, 3.0, 100.0), resident_s=(1.0, 2.0, 50.0))
        assert cached.ratio == 1.5

    def test_a_decision_that_read_is_not_counted(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        timed = decisions.timed
        reads = iter(range(10**6))

        def reading(engine: Engine, tokens: list[int]) -> tuple[float, PrefillResult]:
            wall_s, spent = timed(engine, tokens)
            n_bytes = 4096 if engine.info.is_streamed and next(reads) in (0, 2) else 0
            return wall_s, dataclasses.replace(spent, read_bytes=n_bytes, n_misses=0, n_major_faults=0)

        with Engine.open(moe, n_threads=1, streaming=EVERYTHING) as streamed, Engine.open(moe, n_threads=1) as resident:
            monkeypatch.setattr(decisions, "timed", reading)
            prompt = measurement.Prompt("a", [1, 2, 3])
            (cached,) = caching.beside_resident(streamed, resident, [prompt], lambda text: None)
        assert len(cached.streamed_s) == len(cached.resident_s) == caching.ROUNDS - 1


class TestExpertsUsed:
    @pytest.mark.parametrize("streaming", [None, EVERYTHING])
    def test_every_engine_is_opened_with_as_many(self, moe: Path, streaming: Streaming | None) -> None:
        opened = []

        def noted(path: Path, **options: Any) -> Engine:
            engine = Engine.open(path, **options)
            if not options.get("inspect"):
                opened.append(engine.info.n_expert_used)
            return engine

        plan = Plan(lengths=(20,), repeat=1, streaming=streaming, probe_s=PROBE_S, n_threads=1, n_expert_used=1)
        report = bench.measure(moe, plan, open_engine=noted)
        assert report.info.n_expert_used == 1
        assert set(opened) == {1}


class TestResident:
    @pytest.mark.parametrize("model", ["moe", "dense"])
    def test_only_computing_counts(self, model: str, request: pytest.FixtureRequest) -> None:
        report = measured(request.getfixturevalue(model), lengths=(20, 50), repeat=2)
        assert_adds_up(report)
        assert (report.probes, report.bytes_per_s) == ((), None)
        assert [one.spent.n_tokens for one in report.decisions] == [20, 20, 50, 50]
        assert {(one.io_floor_s, one.missing_bytes) for one in report.decisions} == {(0.0, 0.0)}

    def test_a_dense_model_does_not_stream(self, dense: Path) -> None:
        report = measured(dense, lengths=(20,), repeat=1, streaming=EVERYTHING)
        assert_adds_up(report)
        assert (report.info.is_streamed, report.probes) == (False, ())
