"""What bmoe bench measures, on tiny models: that it is finite and adds up. No timing."""

import dataclasses
import errno
import math
import os
from pathlib import Path
from typing import Any

import gguf
import pytest

from bmoe import Refused, bench
from bmoe.bench import Plan, Report
from bmoe_native import Engine, PrefillResult
from bmoe_native.types import Streaming
from tests import tiny

PROBE_S = 0.01
EVERYTHING = Streaming(cache_bytes=2**40)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("moe") / "m.gguf", arch="qwen3moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("dense") / "m.gguf")


def measured(path: Path, **plan: Any) -> Report:
    return bench.measure(path, Plan(**{"probe_s": PROBE_S, "n_threads": 1, **plan}))


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
        timed = bench._timed

        def noted(engine: Engine, tokens: list[int]) -> tuple[float, PrefillResult]:
            run = timed(engine, tokens)
            runs.append((run[0], dataclasses.replace(run[1], n_major_faults=0)))
            return runs[-1]

        monkeypatch.setattr(bench, "_timed", noted)
        (decision,) = measured(moe, lengths=(40,), repeat=1, streaming=Streaming(cache_bytes=0)).decisions
        _decided, _filled, *floors = runs
        assert len(floors) == bench.FLOOR_RUNS
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

    def test_what_went_out_of_memory_again_is_no_floor(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        timed = bench._timed

        def faulting(engine: Engine, tokens: list[int]) -> tuple[float, PrefillResult]:
            wall_s, spent = timed(engine, tokens)
            return wall_s, dataclasses.replace(spent, n_major_faults=1)

        monkeypatch.setattr(bench, "_timed", faulting)
        (decision,) = measured(moe, lengths=(20,), repeat=1, streaming=EVERYTHING).decisions
        assert "out of memory" in decision.compute_floor.estimated_because


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
            made = [bench.made_tokens(engine, 400, number) for number in range(3)]
            assert made[0] == bench.made_tokens(engine, 400, 0)
            assert bench.made_tokens(engine, 1, 0) == made[0][:1]
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


class TestWhereExpertsLie:
    @pytest.mark.parametrize("arch", sorted(tiny.FAMILIES))
    def test_every_byte_of_them_and_no_other(self, tmp_path: Path, arch: str) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        with Engine.open(path, inspect=True) as engine:
            info = engine.info
        if info.experts_bytes:
            with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0)) as engine:
                info = engine.info
        paths = bench.shards(path, info.n_shards)
        assert len(paths) == info.n_shards
        assert sum(request.n_bytes for request in bench.expert_requests(paths)) == info.streamed_bytes

    def test_they_are_where_the_gguf_package_finds_them(self, moe: Path) -> None:
        wanted = []
        for tensor in gguf.GGUFReader(moe).tensors:
            if "_exps.weight" in tensor.name:
                part = int(tensor.n_bytes) // int(tensor.shape[2])
                wanted += [(int(tensor.data_offset) + n * part, part) for n in range(int(tensor.shape[2]))]
        assert [(request.offset, request.n_bytes) for request in bench.expert_requests([moe])] == sorted(wanted)

    def test_large_ones_are_cut_as_the_engine_cuts_them(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = bench.expert_requests([moe])
        monkeypatch.setattr(bench, "MAX_REQUEST_BYTES", whole[0].n_bytes - 100)
        cut = bench.expert_requests([moe])
        assert [request.n_bytes for request in cut[:2]] == [whole[0].n_bytes - 100, 100]
        assert sum(request.n_bytes for request in cut) == sum(request.n_bytes for request in whole)

    def test_shards_are_named_after_the_first(self, tmp_path: Path) -> None:
        first = tmp_path / "m-00001-of-00003.gguf"
        assert [path.name for path in bench.shards(first, 3)] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        assert bench.shards(first, 1) == [first]


class TestProbe:
    @pytest.mark.parametrize("direct", [True, False])
    def test_what_it_reads(self, moe: Path, direct: bool) -> None:
        probe = bench.probe(bench.expert_requests([moe]), n_threads=2, direct=direct, for_s=PROBE_S)
        assert probe.n_requests >= 2
        assert probe.n_bytes >= probe.n_requests * bench.expert_requests([moe])[0].n_bytes
        assert probe.bytes_per_s > 0

    @pytest.mark.parametrize("refused", ["open", "preadv"])
    def test_a_file_system_that_refuses_direct_reads(
        self, moe: Path, monkeypatch: pytest.MonkeyPatch, refused: str
    ) -> None:
        direct: set[int] = set()
        really_open, really_read = os.open, os.preadv

        def opened(path: Path, flags: int) -> int:
            if flags & os.O_DIRECT and refused == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
            file = really_open(path, flags & ~os.O_DIRECT)
            (direct.add if flags & os.O_DIRECT else direct.discard)(file)
            return file

        def read(file: int, buffers: list[memoryview], offset: int) -> int:
            if file in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return really_read(file, buffers, offset)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", read)
        probe = bench.probe(bench.expert_requests([moe]), n_threads=2, direct=True, for_s=PROBE_S)
        assert not probe.is_direct
        assert probe.n_bytes > 0

    def test_what_cannot_be_read_raises(self, moe: Path, tmp_path: Path) -> None:
        gone = [bench.Request(tmp_path / "gone.gguf", 0, 4096)]
        with pytest.raises(FileNotFoundError):
            bench.probe(gone, n_threads=1, direct=True, for_s=PROBE_S)


class TestSystem:
    def test_the_caches_are_dropped_by_who_may(self, tmp_path: Path) -> None:
        file = tmp_path / "drop_caches"
        bench.drop_caches(file)
        assert file.read_text() == "3\n"
        with pytest.raises(Refused, match="only root"):
            bench.drop_caches(tmp_path / "nowhere" / "drop_caches")

    def test_peaks(self, moe: Path) -> None:
        memory = measured(moe, lengths=(20,), repeat=1, streaming=EVERYTHING).memory
        assert memory.anonymous_bytes is not None
        assert memory.anonymous_bytes > 2**20

    @pytest.mark.parametrize(
        ("lines", "folder", "names"),
        [
            ("5:cpu:/\n4:memory:/a/b\n0::/\n", "memory/a/b", ("memory.max_usage_in_bytes", "memory.limit_in_bytes")),
            ("4:memory:/outside\n", "memory", ("memory.max_usage_in_bytes", "memory.limit_in_bytes")),
            ("0::/a.slice/b:c\n", "a.slice/b:c", ("memory.peak", "memory.max")),
        ],
    )
    def test_cgroups_of_both_versions(self, tmp_path: Path, lines: str, folder: str, names: tuple[str, str]) -> None:
        place = tmp_path / "mount" / folder
        place.mkdir(parents=True)
        membership = tmp_path / "cgroup"
        membership.write_text(lines)
        for name, text in zip(names, ("1000\n", "4294967296\n"), strict=True):
            (place / name).write_text(text)
        assert bench.cgroup_memory(membership, tmp_path / "mount") == (1000, 2**32)
        for unlimited in ("max\n", "9223372036854771712\n"):
            (place / names[1]).write_text(unlimited)
            assert bench.cgroup_memory(membership, tmp_path / "mount") == (1000, None)

    def test_no_cgroup(self, tmp_path: Path) -> None:
        assert bench.cgroup_memory(tmp_path / "none", tmp_path) == (None, None)
