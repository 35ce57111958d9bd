"""Gate g: what a session with a device decides, writes and scores equals the same session all on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import GenerateRequest, Refused, Sampling, Session
from bmoe.decide.perplexity import PerplexityRequest
from bmoe.probe import Probe, Record
from bmoe.route_trace import RouteTrace
from bmoe.trace import COLUMNS, CsvTrace
from bmoe_native import Engine, Streaming
from tests import tiny
from tests.device.server import Server
from tests.gates import gates
from tests.gates.test_gates import letters_only
from tests.protocol.fake import check, served

UBATCH, LEAST = 64, 32
HOT = Sampling(temperature=1.5, seed=5)
TEXT = f"{gates.GROWN} {gates.SUFFIXES[0]} {gates.PREFIX} {gates.SUFFIXES[1]}"


def opened(path: Path, device: str = "", streaming: Streaming | None = None, **hooks: Any) -> Engine:
    engine = Engine.open(
        path, n_ubatch=UBATCH, n_threads=1, repack=False, prefill_device=device, streaming=streaming, **hooks
    )
    assert engine.info.prefill_device == device, engine.info.prefill_device_why
    return engine


def session(path: Path, device: str = "", streaming: Streaming | None = None) -> Session:
    """Without a device the pieces of a prompt are the same only where no prefix is kept."""
    return Session(opened(path, device, streaming), prefix_cache="auto" if device else "off")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("moe") / "m.gguf", arch="qwen3moe", n_ctx_train=1024, head=letters_only)


def talk(path: Path, device: str, streaming: Streaming | None) -> tuple[Any, ...]:
    engine = opened(path, device, streaming)
    with Session(engine, prefix_cache="auto" if device else "off") as talking:
        asked = [(gates.PREFIX, gates.SUFFIXES[0]), (gates.GROWN, gates.SUFFIXES[1]), (gates.GROWN, gates.SUFFIXES[0])]
        said: list[Any] = [gates.ask(talking, *question).choice_logp for question in asked]
        for number, prompt in enumerate(gates.TURNS):
            request = GenerateRequest(prompt=prompt, n_predict=24, sampling=HOT, clear_kv=number == 0)
            said += [talking.generate(request).text, gates.ask(talking, *asked[number]).choice_logp]
        scored = talking.perplexity(PerplexityRequest(text=TEXT, window=100, stride=20, choices=gates.CHOICES))
        said += [scored.token_logp, scored.choice_logp]
        told = talking.generate(GenerateRequest(prompt=gates.TURNS[1], n_predict=24, sampling=HOT))
        assert (engine.counters().dev_tokens > 10 * UBATCH) == bool(device)
        return *said, told.text, engine.logits()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_session_answers_as_on_the_cpu(family: str, server: Server, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=family, n_ctx_train=1024, head=letters_only)
    *wanted, logits = talk(path, "", None)
    assert all(wanted)
    ways = [None, Streaming(cache_bytes=0)] if tiny.FAMILIES[family].metadata.get("expert_count") else [None]
    for streaming in ways:
        *got, theirs = talk(path, server.name(), streaming)
        assert got == wanted
        np.testing.assert_array_equal(theirs, logits)


@pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=0)])
def test_a_narrow_end_stays_on_the_cpu(streaming: Streaming | None, moe: Path, server: Server) -> None:
    engine = opened(moe, server.name(), streaming)
    with session(moe) as plain, Session(engine) as mixed:
        ask = {"prefix": TEXT, "suffix": "", "choices": gates.CHOICES, "template": False}
        n_tokens = len(engine.text_tokens(TEXT, add_bos=True))
        n_narrow = n_tokens % UBATCH
        assert n_tokens > 3 * UBATCH and 0 < n_narrow < LEAST
        wanted, got = plain.decide(**ask), mixed.decide(**ask)
        assert got.choice_logp == wanted.choice_logp
        assert got.n_prefilled == wanted.n_prefilled == n_tokens
        assert (wanted.prefill_dev_tokens, wanted.prefill_dev_nodes) == (0, 0)
        assert got.prefill_dev_tokens == engine.counters().dev_tokens == n_tokens - n_narrow
        request = GenerateRequest(prompt=TEXT, template=False, n_predict=8)
        turn = mixed.generate(request)
        assert (turn.text, turn.n_generated) == (plain.generate(request).text, 8)
        assert (turn.n_prompt, turn.prefill_dev_tokens) == (n_tokens, n_tokens - n_narrow)
        assert engine.counters().dev_tokens == 2 * (n_tokens - n_narrow)  # a generated token is narrow


def test_no_prefix_is_kept_and_that_cannot_be_had_otherwise(moe: Path, server: Server) -> None:
    with session(moe, server.name()) as auto:
        for _ in range(2):
            result = gates.ask(auto, gates.PREFIX, gates.SUFFIXES[0])
            assert (result.n_reused, result.prefix_state_mib) == (0, 0.0)
    with opened(moe, server.name()) as engine, pytest.raises(Refused, match="prefix_cache on cannot be had"):
        Session(engine, prefix_cache="on")
    with Engine.open(moe, prefill_device=server.name("no_memory"), on_log=lambda _level, _text: None) as engine:
        kept = Session(engine, prefix_cache="on")
        gates.ask(kept, gates.PREFIX, gates.SUFFIXES[0])
        assert gates.ask(kept, gates.PREFIX, gates.SUFFIXES[0]).n_reused > 0


def test_lines_and_rows_tell_what_the_device_computed(moe: Path, server: Server, tmp_path: Path) -> None:
    ask = {"cmd": "decide", "id": 1, "prefix": TEXT, "suffix": "", "choices": gates.CHOICES, "template": False}
    lines = [ask, {**ask, "id": 2}, {"cmd": "generate", "id": 3, "prompt": TEXT, "n_predict": 2, "template": False}]
    with session(moe) as plain, session(moe, server.name(), Streaming(cache_bytes=0)) as mixed:
        with CsvTrace(tmp_path / "trace.csv") as trace:
            got = served(*lines, session=mixed, watchers=[trace])
        wanted = served(*lines, session=plain)
    first, second, turn = (record for tag, record in got if tag in ("DECIDE", "DONE"))
    for tag, record in got:
        check(tag, record)
    same = ("choice_logp", "text", "n_prefilled", "n_prompt")
    for mine, theirs in zip(got, wanted, strict=True):
        assert [mine[1].get(key) for key in same] == [theirs[1].get(key) for key in same]
    n_tokens = first["n_tokens"]
    for record in (first, second, turn):
        assert record["prefill_dev_tokens"] == n_tokens // UBATCH * UBATCH
        assert record["prefill_dev_read_mib"] > 0 < record["prefill_dev_stall_s"] < record["prefill_s"]
        assert record["prefill_dev_routed"] > tiny.family.N_EXPERT and record["prefill_dev_nodes"] > 100
        assert record["prefill_read_mib"] > 0  # for the narrow end
    # What the last piece asked for is foreseen for the next: much of it, from the second decision on.
    assert first["prefill_dev_demand"] > second["prefill_dev_demand"] >= 0
    for record in (record for tag, record in wanted if tag in ("DECIDE", "DONE")):
        assert not any(value for key, value in record.items() if key.startswith("prefill_dev_"))
    rows = [line.split(",") for line in (tmp_path / "trace.csv").read_text().splitlines()[1:]]
    told = [row[COLUMNS.index("dev_tokens")] for row in rows if row[COLUMNS.index("kind")] != "token"]
    assert told == [str(n_tokens // UBATCH * UBATCH)] * 3


def test_the_probe_and_the_trace_of_routes_see_what_they_see_on_the_cpu(
    moe: Path, server: Server, tmp_path: Path
) -> None:
    seen: list[list[Any]] = []
    for device in ("", server.name()):
        records: list[Record] = []
        probe = Probe(records.append)
        file = tmp_path / f"{len(seen)}.csv"
        with RouteTrace(file) as trace:

            def routed(routing: Any, probe: Probe = probe, trace: RouteTrace = trace) -> None:
                probe.routed(routing)
                trace.routed(routing)

            engine = opened(moe, device, on_routing=routed, on_layer=probe.layer_ended)
            with Session(engine, prefix_cache="auto" if device else "off", probe=probe, route_trace=trace) as probed:
                gates.ask(probed, gates.GROWN, gates.SUFFIXES[0])
                probed.generate(GenerateRequest(prompt=TEXT, n_predict=3))
        (record,) = records
        assert record.lens is not None and record.routed is not None, record.lens_why
        seen.append([record.logp.tolist(), record.lens.tolist(), record.routed.cnt.tolist()])
        seen[-1] += [record.routed.wsum.tolist(), file.read_bytes()]
    assert seen[0] == seen[1] and len(seen[0][-1]) > 10_000


def test_the_trace_of_routes_tells_what_was_foreseen(moe: Path, server: Server, tmp_path: Path) -> None:
    with RouteTrace(tmp_path / "t.csv") as trace:
        engine = opened(moe, server.name(), Streaming(cache_bytes=0), on_routing=trace.routed)
        with Session(engine, route_trace=trace) as traced:
            for _ in range(2):
                traced.decide(prefix=TEXT[:200], suffix="", choices=gates.CHOICES, template=False)
    rows = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    assert {row[6] for row in rows if row[8] == "1" and row[1] == "0"} == {"absent"}
    assert "ahead" in {row[6] for row in rows if row[8] == "2" and row[1] == "0"}
