"""Which experts tokens are routed to: rows against what the engine tells and counts; and tracing changes no bit."""

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import GenerateRequest, Refused, Session
from bmoe.route_trace import COLUMNS, RouteTrace
from bmoe_native import Engine, Routing, Streaming
from tests import tiny
from tests.fakes import ScriptedEngine

MIB = 2**20
ASK = {"prefix": "A question of some length, so that experts are asked for. ", "suffix": "b?", "choices": ("b", "k")}
ROUTES = (1 / 3, 2 / 3, 1e-9, 1.0, np.pi / 10, 0.1)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def endless(rows: Any) -> Any:
        rows[[index for index, token in enumerate(tiny.vocabulary()[0]) if token.startswith("<|")]] = 0
        return rows

    return tiny.write(tmp_path_factory.mktemp("moe") / "moe.gguf", arch="qwen3moe", head=endless)


def rows(path: Path) -> list[dict[str, Any]]:
    """The file's, numbers as numbers."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    header, *lines = csv.reader(data.decode("ascii").splitlines())
    assert tuple(header) == COLUMNS
    found: list[dict[str, Any]] = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    for row in found:
        row |= {name: int(row[name]) for name in COLUMNS if name not in ("phase", "weight", "residency")}
    return found


def routing(layer: int, experts: Any, **changes: Any) -> Routing:
    chosen = np.array(experts, np.int32)
    weights = np.resize(np.array(ROUTES, np.float32), chosen.shape)
    told = {"n_expert": 8, "weights": weights, "residency": None, "expert_bytes": 100, **changes}
    return Routing(layer=layer, experts=chosen, **told)


class TestRows:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "route.csv"

    def test_a_row_for_each_token_and_slot(self, path: Path) -> None:
        with RouteTrace(path) as trace:
            trace.began()
            told = routing(1, [[3, 0], [3, 7]], residency=np.array([[0, 1], [0, 2]], np.uint8))
            trace.routed(told)
        found = rows(path)
        assert [(r["token"], r["slot"], r["expert"], r["residency"], r["bytes"]) for r in found] == [
            (0, 0, 3, "absent", 100),
            (0, 1, 0, "ahead", 100),
            (1, 0, 3, "absent", 0),
            (1, 1, 7, "resident", 100),
        ]
        assert {(r["phase"], r["step"], r["layer"], r["seq"]) for r in found} == {("prefill", 0, 1, 1)}
        np.testing.assert_array_equal(np.array([r["weight"] for r in found], np.float32), told.weights.ravel())

    def test_every_float32_reads_back(self, path: Path) -> None:
        weights = np.random.default_rng(1).integers(1, 2**30, (5000, 2), np.uint32).view(np.float32)
        with RouteTrace(path) as trace:
            trace.began()
            trace.routed(routing(0, np.zeros((5000, 2)), weights=weights))
        np.testing.assert_array_equal(np.array([r["weight"] for r in rows(path)], np.float32), weights.ravel())

    def test_a_graph_begins_where_a_layer_is_not_above_the_one_before(self, path: Path) -> None:
        with RouteTrace(path) as trace:
            trace.began()
            for layer in (1, 2, 1, 2, 2):
                trace.routed(routing(layer, [[0]]))
            trace.sampled()
            trace.routed(routing(3, [[0]]))
            trace.sampled()
            trace.routed(routing(3, [[0]]))
            trace.began()
            trace.routed(routing(4, [[0]]))
        assert [(r["seq"], r["phase"], r["step"], r["layer"]) for r in rows(path)] == [
            *[(1, "prefill", step, layer) for step, layer in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 2))],
            (1, "decode", 0, 3),
            (1, "decode", 1, 3),
            (2, "prefill", 0, 4),
        ]

    def test_a_layer_with_fewer_tokens_has_the_last_of_the_graph(self, path: Path) -> None:
        with RouteTrace(path) as trace:
            trace.began()
            trace.routed(routing(0, [[0], [1], [2]]))
            trace.routed(routing(1, [[5]]))
            trace.routed(routing(0, [[0], [1]]))
        assert [(r["layer"], r["token"]) for r in rows(path)] == [(0, 0), (0, 1), (0, 2), (1, 2), (0, 0), (0, 1)]

    def test_a_layer_is_written_at_once(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = []
        write = os.write
        with RouteTrace(path) as trace:
            trace.began()
            monkeypatch.setattr(os, "write", lambda file, data: sizes.append(data.count(b"\n")) or write(file, data))
            trace.routed(routing(0, np.zeros((300, 8))))
            trace.routed(routing(1, np.zeros((0, 8))))
        assert sizes == [2400]
        assert len(rows(path)) == 2400

    def test_it_goes_on_after_whole_rows(self, path: Path) -> None:
        for _ in range(2):
            with RouteTrace(path) as trace:
                trace.began()
                trace.routed(routing(0, [[1, 2]]))
            with path.open("ab") as torn:
                torn.write(b"prefill,0,0")
        with RouteTrace(path):
            pass
        assert [r["expert"] for r in rows(path)] == [1, 2, 1, 2]

    def test_what_is_refused(self, path: Path, tmp_path: Path) -> None:
        path.write_text("seq,id,kind\n")
        with pytest.raises(Refused, match=r"^--route-trace: .* holds something else"):
            RouteTrace(path)
        assert path.read_text() == "seq,id,kind\n"
        with pytest.raises(Refused, match="--route-trace: cannot write"):
            RouteTrace(tmp_path / "no" / "such")
        with (
            RouteTrace(tmp_path / "trace.csv"),
            pytest.raises(Refused, match="--route-trace: another process is writing"),
        ):
            RouteTrace(tmp_path / "trace.csv")

    def test_a_full_disk_ends_the_trace_alone(self, moe: Path) -> None:
        notes: list[str] = []
        with RouteTrace(Path("/dev/full"), note=notes.append) as trace, Session.open(moe, route_trace=trace) as session:
            session.decide(**ASK)  # type: ignore[arg-type]
        assert notes == ["--route-trace: /dev/full ends here: No space left on device"]


class TestSessions:
    """Through the real engine."""

    @pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=64 * MIB, prefetch="off")])
    def test_rows_are_what_the_engine_tells(self, moe: Path, tmp_path: Path, streaming: Streaming | None) -> None:
        told: list[Routing] = []
        tokens = list(range(40, 60))
        with Engine.open(moe, repack=False, streaming=streaming, on_routing=told.append) as engine:
            engine.prefill(tokens)
        with (
            RouteTrace(tmp_path / "t.csv") as trace,
            Session.open(moe, repack=False, streaming=streaming, route_trace=trace) as session,
        ):
            trace.began()
            session._engine.prefill(tokens)
            info = session.info
        found = rows(tmp_path / "t.csv")
        assert [r["expert"] for r in found] == [expert for part in told for expert in part.experts.ravel().tolist()]
        weights = np.concatenate([part.weights.ravel() for part in told])
        np.testing.assert_array_equal(np.array([r["weight"] for r in found], np.float32), weights)
        assert {r["residency"] for r in found} == ({"resident"} if streaming is None else {"absent"})
        last = [(r["token"], r["slot"]) for r in found if r["layer"] == info.n_layer - 1]
        assert last == [(len(tokens) - 1, slot) for slot in range(info.n_expert_used)]

    @pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2", "granitehybrid"])
    @pytest.mark.parametrize("prefetch", ["off", "both"])
    def test_bytes_are_those_that_the_engine_counts(self, arch: str, prefetch: str, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        one = Engine.open(path, inspect=True).info
        expert_bytes = one.experts_bytes // (one.n_moe_layer * one.n_expert)
        # Room for some experts, so that requests after the first find some and not others.
        streaming = Streaming(cache_bytes=3 * expert_bytes * one.n_moe_layer, prefetch=prefetch)
        results = []
        with (
            RouteTrace(tmp_path / "t.csv") as trace,
            Session.open(path, n_ubatch=16, n_threads=1, streaming=streaming, route_trace=trace) as session,
        ):
            for suffix in ("one", "two", "three"):
                spent = session._engine.counters()
                result = session.decide(**{**ASK, "suffix": suffix})  # type: ignore[arg-type]
                results.append((result, spent, session._engine.counters()))
        found = rows(tmp_path / "t.csv")
        assert {r["seq"] for r in found} == {1, 2, 3}
        assert max(r["step"] for r in found if r["seq"] == 1) >= 3
        n_hits = 0
        for seq, (result, before, after) in enumerate(results, 1):
            of_it = [r for r in found if r["seq"] == seq]
            assert sum(r["bytes"] for r in of_it) == result.prefill_routed_mib * MIB > 0
            missed = sum(r["bytes"] for r in of_it if r["residency"] in ("absent", "ahead"))
            hits = after.n_hits - before.n_hits
            assert missed == result.prefill_routed_mib * MIB - hits * expert_bytes
            n_hits += hits
        assert n_hits > 0
        assert ("ahead" in {r["residency"] for r in found}) == (prefetch == "both")

    def test_phases_and_numbers_of_a_turn(self, moe: Path, tmp_path: Path) -> None:
        with (
            RouteTrace(tmp_path / "t.csv") as trace,
            Session.open(moe, n_ubatch=16, streaming=Streaming(), route_trace=trace) as session,
        ):
            session.decide(**ASK)  # type: ignore[arg-type]
            turn = session.generate(GenerateRequest(prompt="Hello, and tell me of it", n_predict=5))
            session.perplexity("some text of several tokens")
            n_moe_layer, n_layer = session.info.n_moe_layer, session.info.n_layer
        found = rows(tmp_path / "t.csv")
        phases = {seq: {r["phase"] for r in found if r["seq"] == seq} for seq in (1, 2, 3)}
        assert phases == {1: {"prefill"}, 2: {"prefill", "decode"}, 3: {"prefill"}}
        decoded = [r for r in found if r["phase"] == "decode"]
        assert turn.n_generated == 5
        graphs = sorted({(r["step"], r["layer"]) for r in decoded})
        assert graphs == [(step, layer) for step in range(4) for layer in range(n_layer - n_moe_layer, n_layer)]
        assert {r["token"] for r in decoded} == {0}
        of_prompt = [r for r in found if (r["seq"], r["phase"]) == (2, "prefill")]
        assert sum(r["bytes"] for r in of_prompt) == turn.prefill_routed_mib * MIB
        assert sum(r["bytes"] for r in decoded) == turn.routed_mib * MIB
        sizes = Counter(r["step"] for r in of_prompt if (r["layer"], r["slot"]) == (n_layer - n_moe_layer, 0))
        assert sum(sizes.values()) == turn.n_prompt
        assert set(sizes) == set(range(-(-turn.n_prompt // 16)))

    @pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=0)])
    def test_tracing_changes_no_bit(self, moe: Path, tmp_path: Path, streaming: Streaming | None) -> None:
        answers = []
        for trace in (None, RouteTrace(tmp_path / "t.csv")):
            with Session.open(moe, n_threads=2, streaming=streaming, route_trace=trace) as session:
                decision = session.decide(**ASK)  # type: ignore[arg-type]
                again = session.decide(**{**ASK, "suffix": "k?"})  # type: ignore[arg-type]
                turn = session.generate(GenerateRequest(prompt="Hello", n_predict=8))
                scored = session.perplexity("some text of several tokens")
            masses = [(result.choice_logp, result.outside_mass) for result in (decision, again)]
            answers.append((masses, turn.text, scored.token_logp))
        assert trace is not None
        trace.close()
        assert answers[0] == answers[1]
        assert len(rows(tmp_path / "t.csv")) > 500

    def test_a_dense_model_has_a_header_only(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "dense.gguf")
        with RouteTrace(tmp_path / "t.csv") as trace, Session.open(path, route_trace=trace) as session:
            session.decide(**ASK)  # type: ignore[arg-type]
        assert rows(tmp_path / "t.csv") == []


def test_every_kind_of_request_is_numbered(tmp_path: Path) -> None:
    trace = RouteTrace(tmp_path / "t.csv")
    with Session(ScriptedEngine(), route_trace=trace) as session:
        session.decide(prefix="p", choices=("A", "B"))
        with pytest.raises(Refused):
            session.decide(prefix="p", choices=("A", "A"))
        session.generate(GenerateRequest(prompt="p", n_predict=1))
        session.perplexity("one two")
    trace.close()
    assert trace.next_seq == 5


def test_other_numbers_of_experts(moe: Path) -> None:
    with Session.open(moe, n_threads=1) as session:
        wanted, n_used = session.decide(**ASK), session.info.n_expert_used  # type: ignore[arg-type]
    answers = []
    for streaming in (None, Streaming()):
        with Session.open(moe, n_threads=1, repack=False, n_expert_used=1, streaming=streaming) as session:
            assert (session.info.n_expert_used, n_used) == (1, 2)
            answers.append(session.decide(**ASK).choice_logp)  # type: ignore[arg-type]
    assert answers[0] == answers[1] != wanted.choice_logp
