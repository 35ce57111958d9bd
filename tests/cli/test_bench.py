"""bmoe bench as typed: what arrives, what is refused, the table, the JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bmoe import bench
from bmoe.bench import (
    Bound,
    Cached,
    Comparison,
    Decision,
    Floor,
    Memory,
    Plan,
    Probe,
    Repetition,
    Report,
    Stock,
    Way,
)
from bmoe_native import PrefillResult
from bmoe_native.types import Streaming
from tests import tiny
from tests.cli.conftest import Terminal
from tests.fakes import INFO

MIB = 2**20
STREAMED = dataclasses.replace(
    INFO, is_streamed=True, reads_direct=True, n_moe_layer=24, streamed_bytes=17_000_000_000, cache_bytes=3000 * MIB
)
BENCH = ("bench", "-m", "x.gguf")
DOC = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
SPENT = PrefillResult(
    cancelled=False,
    n_tokens=12345,
    prefill_s=199.5,
    prefill_cpu_s=300.25,
    n_major_faults=123,
    read_bytes=20000 * MIB,
    routed_bytes=16000 * MIB,
    ahead_bytes=12000 * MIB,
    wasted_bytes=4000 * MIB,
    n_hits=1000,
    n_misses=3000,
    io_s=150.0,
    stall_s=80.0,
    mgmt_s=10.0,
)
DECISION = Decision(
    name="settings",
    is_cold=True,
    open_s=2.0,
    cache_bytes=3000 * MIB,
    wall_s=200.0,
    spent=SPENT,
    peak_anonymous_bytes=4000 * MIB,
    anonymous_before_bytes=40 * MIB,
    bound=Bound(dense_bytes=500 * MIB, buffers_bytes=300 * MIB, cache_bytes=3000 * MIB),
    missing_bytes=12000 * MIB,
    io_floor_s=100.0,
    compute_floor=Floor(s=50.0),
)
REPETITION = Repetition(
    imports_s=0.5,
    open_s=1.0,
    decision_s=8.5,
    answer_s=10.0,
    warm_s=5.0,
    cpu_s=12.0,
    n_major_faults=7,
    cache_mib=3000.0,
    read_mib=6000.0,
)
SLOWER = dataclasses.replace(REPETITION, answer_s=40.0, warm_s=20.0)
SLOWEST = dataclasses.replace(REPETITION, answer_s=60.0, warm_s=30.0)
STOCK = Stock(
    page_cache="fadvise",
    comparisons=(
        Comparison(
            names=("settings", "n" * 30),
            n_tokens=(70, 71),
            ways=(
                Way(name="streamed", repetitions=(REPETITION,)),
                Way(name="mapped", repetitions=(SLOWEST, SLOWER, SLOWER)),
                Way(name="repacked", unmeasured_because="why not"),
            ),
        ),
    ),
)
PROBE = Probe(is_direct=True, n_threads=4, n_bytes=240 * MIB, n_requests=100, elapsed_s=2.0)
REPORT = Report(
    info=STREAMED,
    plan=Plan(lengths=(70,), streaming=Streaming()),
    probes=(PROBE, dataclasses.replace(PROBE, elapsed_s=2.4)),
    decisions=(
        DECISION,
        dataclasses.replace(
            DECISION, name="n" * 30, is_cold=False, compute_floor=Floor(s=110.0, estimated_because="why")
        ),
    ),
    memory=Memory(anonymous_bytes=4000 * MIB, cgroup_bytes=4096 * MIB, cgroup_limit_bytes=4096 * MIB),
    cached=(
        Cached(name="settings", streamed_s=(2.1,), resident_s=(2.0,)),
        Cached(name="other", unmeasured_because="no room"),
    ),
    stock=STOCK,
)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Plan]]:
    """What was to be measured; the report is REPORT."""
    calls = []

    def measure(path: Path, plan: Plan, *, on_stage: Any, on_repetition: Any) -> Report:
        on_stage("measuring")
        on_repetition("settings, streamed, 1 of 3")
        calls.append((path, plan))
        return REPORT

    monkeypatch.setattr(bench, "measure", measure)
    return calls


class TestWhatArrives:
    def test_the_defaults(self, bmoe: Terminal, measured: list[tuple[Path, Plan]]) -> None:
        assert bmoe(*BENCH) == 0
        assert measured == [(Path("x.gguf"), Plan(lengths=(70, 280), repeat=3))]

    def test_every_flag(self, bmoe: Terminal, measured: list[tuple[Path, Plan]]) -> None:
        flags = "--n-expert-used 3 --stock "
        flags += "--tokens 5 --repeat 2 -t 3 -c 600 --ubatch 64 --moe-stream --cache-mb 300 --io-threads 8 --no-odirect"
        assert (
            bmoe(*BENCH, *flags.split(), "--prefetch", "off", "--dense-weights", "anon", "--no-repack", "--drop-caches")
            == 0
        )
        assert measured[0][1] == Plan(
            lengths=(5,),
            repeat=2,
            n_threads=3,
            n_ctx=600,
            n_ubatch=64,
            n_expert_used=3,
            stock=True,
            streaming=Streaming(cache_bytes=300 * MIB, io_threads=8, direct=False, prefetch="off", dense="anon"),
            repack=False,
            drop_caches=True,
        )

    def test_prompts_are_named_after_their_files(
        self, bmoe: Terminal, measured: list[tuple[Path, Plan]], tmp_path: Path
    ) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.txt").write_text(f"text of {name}\n")
        files = ("--prompt", str(tmp_path / "a.txt"), "--prompt", str(tmp_path / "b.txt"))
        assert bmoe(*BENCH, *files, "--no-template") == 0
        assert measured[0][1] == Plan(texts=(("a", "text of a\n"), ("b", "text of b\n")), template=False)

    def test_with_stock_files_are_pairs_that_are_repeated(
        self, bmoe: Terminal, measured: list[tuple[Path, Plan]], tmp_path: Path
    ) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.txt").write_text(name)
        files = ("--prompt", str(tmp_path / "a.txt"), "--prompt", str(tmp_path / "b.txt"))
        assert bmoe(*BENCH, *files, "--moe-stream", "--stock", "--repeat", "5") == 0
        plan = measured[0][1]
        assert (plan.texts, plan.stock, plan.repeat) == ((("a", "a"), ("b", "b")), True, 5)

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            ("--tokens 0", "--tokens must be"),
            ("--tokens 70,", "--tokens must be"),
            ("--tokens 7e1", "--tokens must be"),
            ("--tokens -5", "--tokens must be"),
            (f"--tokens {'9' * 30}", "--tokens must be"),
            ("--repeat 0", "--repeat"),
            ("--prompt nowhere.txt", "cannot read"),
            ("--prompt x --tokens 5", "takes the place"),
            ("--prompt x --repeat 5", "takes the place"),
            ("--no-template", "does nothing without --prompt"),
            ("--stock", "--stock compares with streaming"),
            ("--moe-stream --stock --prompt x", "in pairs"),
            ("--n-expert-used -1", "--n-expert-used"),
            ("--moe-stream --cache-mb many", "--cache-mb must be"),
        ],
    )
    def test_refusals(self, bmoe: Terminal, measured: list[tuple[Path, Plan]], flags: str, reason: str) -> None:
        assert bmoe(*BENCH, *flags.split()) == 2
        assert reason in " ".join(bmoe.err.split())
        assert not measured

    def test_flags_without_effect_are_said(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--cache-mb", "5") == 0
        assert "--cache-mb does nothing without --moe-stream" in bmoe.err


class TestTable:
    def test_it_holds_the_figures_in_80_columns(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--moe-stream") == 0
        lines = bmoe.out.splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in bmoe.out
        rows = [line.split() for line in lines if line.strip().startswith("settings *")]
        assert rows == [
            ["settings", "*", "12345", "200.0", "300.2", "150.0", "80.000", "100.0", "50.000", "2.00"],
            ["settings", "*", "16000", "12000", "20000", "12000", "4000", "1000", "3000", "123"],
            ["settings", "*", "4000", "3800", "500", "300", "3000", "1.05"],
        ]
        text = " ".join(bmoe.out.split())
        assert "direct reads of 2.40 MiB at random by 4 threads, before: 120 MiB/s" in text
        assert "after: 100 MiB/s" in text
        assert "peak of the cgroup 4096 MiB of 4096" in text
        assert "~110.0" in text
        assert "~ not measured: why." in text
        assert "settings, streamed with every expert kept: 2.100 s, resident 2.000 s, ratio 1.050" in text
        assert "other, streamed with every expert kept, to resident: no room" in text

    def test_the_stock_way_beside_it(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--moe-stream") == 0
        assert max(map(len, bmoe.out.splitlines())) <= 80
        rows = {line.split()[0]: line.split()[1:] for line in bmoe.out.splitlines() if "(" in line}
        assert " ".join(rows["streamed"]) == "10.00 (10.00 - 10.00) 9.50 (9.50 - 9.50) 5.00 (5.00 - 5.00)"
        assert " ".join(rows["mapped"]) == "40.00 (40.00 - 60.00) 39.50 (39.50 - 59.50) 20.00 (20.00 - 30.00)"
        text = " ".join(bmoe.out.split())
        assert "the page cache of the model's files emptied before each" in text
        assert "repacked: why not" in text
        assert "first answer: mapped takes 4.00 times as long as streamed" in text
        assert "warm: mapped takes 4.00 times as long as streamed" in text

    def test_each_process_is_told_of_as_it_ends(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--moe-stream", "--json") == 0
        assert "bmoe: settings, streamed, 1 of 3\n" in bmoe.err

    def test_a_model_that_does_not_stream(self, bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = Memory(anonymous_bytes=None, cgroup_bytes=5 * MIB, cgroup_limit_bytes=None)
        report = dataclasses.replace(REPORT, info=INFO, probes=(), memory=memory, cached=(), stock=None)
        monkeypatch.setattr(bench, "measure", lambda path, plan, on_stage, on_repetition: report)
        assert bmoe(*BENCH) == 0
        assert not {"random", "routed", "peak"} & set(bmoe.out.split())


class TestJson:
    def test_the_figures(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--json") == 0
        told = bmoe.json()
        assert (told["model"], told["bandwidth_mib_s"], told["cgroup_peak_mib"]) == ("x.gguf", 120.0, 4096.0)
        first, second = told["decisions"]
        assert (first["compute_floor_estimated"], second["compute_floor_estimated"]) == (None, "why")
        assert (first["floor_s"], second["floor_s"]) == (100.0, 110.0)
        for decision in told["decisions"]:
            for name in ("open", "wall", "cpu", "io", "stall", "mgmt"):
                assert decision[f"{name}_ratio"] == pytest.approx(decision[f"{name}_s"] / decision["floor_s"])
        assert first["peak_anonymous_bytes"] == 4000 * MIB
        assert first["anonymous_bound_bytes"] == sum(first["anonymous_bound"].values()) == 3800 * MIB
        assert first["anonymous_ratio"] == pytest.approx(4000 / 3800)
        assert [(one["cached_ratio"], one["unmeasured"]) for one in told["cached"]] == [(1.05, None), (None, "no room")]
        assert (first["missing_mib"], first["n_hits"], first["n_misses"]) == (12000.0, 1000, 3000)

    def test_the_stock_way(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--json") == 0
        (told,) = bmoe.json()["stock"]["comparisons"]
        ratios = told["stock_ratio"]
        assert (ratios["answer_s"], ratios["warm_s"]) == (4.0, 4.0)
        assert ratios["answer_without_imports_s"] == pytest.approx(39.5 / 9.5)
        assert told["quicker_stock"]["warm_s"] == "mapped"
        streamed, mapped, repacked = told["ways"]
        assert mapped["median"] == {"answer_s": 40.0, "answer_without_imports_s": 39.5, "warm_s": 20.0}
        assert [one["answer_s"] for one in mapped["repetitions"]] == [60.0, 40.0, 40.0]
        assert streamed["repetitions"][0]["answer_without_imports_s"] == 9.5
        assert (repacked["unmeasured"], repacked["repetitions"]) == ("why not", [])

    def test_nothing_is_said_of_it_where_it_was_not_asked_for(
        self, bmoe: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report = dataclasses.replace(REPORT, stock=None)
        monkeypatch.setattr(bench, "measure", lambda path, plan, on_stage, on_repetition: report)
        assert bmoe(*BENCH, "--json") == 0
        assert bmoe.json()["stock"] is None

    def test_every_key_is_documented(self, bmoe: Terminal) -> None:
        assert bmoe(*BENCH, "--json") == 0
        told = bmoe.json()
        documented = DOC.read_text()
        keys = set(_keys(told))
        assert not [key for key in keys if f"`{key}`" not in documented]

    @pytest.mark.parametrize("flags", [(), ("--moe-stream", "--cache-mb", "0")])
    def test_a_real_run(
        self, bmoe: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
    ) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(bench.Plan.__init__, "__kwdefaults__", {**_defaults(), "probe_s": 0.01})
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        assert bmoe("bench", "-m", str(path), "--tokens", "20", "--repeat", "2", "-t", "1", "--json", *flags) == 0
        told = bmoe.json()
        assert told["is_streamed"] == bool(flags)
        assert [one["is_cold"] for one in told["decisions"]] == [True, False]
        numbers = [value for one in told["decisions"] for value in one.values() if isinstance(value, float)]
        assert all(math.isfinite(value) and value >= 0 for value in numbers)
        assert json.loads(bmoe.out) == told

    def test_a_dense_model_does_not_stream_and_that_is_said(
        self, bmoe: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()
        path = tiny.write(tmp_path / "m.gguf")
        flags = ("--moe-stream", "--tokens", "20", "--repeat", "1", "-t", "1", "--json")
        assert bmoe("bench", "-m", str(path), *flags) == 0
        assert "no routed experts" in bmoe.err
        assert (bmoe.json()["is_streamed"], bmoe.json()["probes"]) == (False, [])


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def _defaults() -> dict[str, Any]:
    return dict(bench.Plan.__init__.__kwdefaults__ or {})
