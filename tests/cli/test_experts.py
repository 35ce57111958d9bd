"""The flags that stream experts: what arrives, what is refused, what is said; and what a streamed model answers."""

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bmoe.cli.app import main
from bmoe.cli.experts import ExpertFlags
from bmoe.cli.opening import OUR_WARNINGS
from bmoe.cli.shell import Shell
from bmoe_native.errors import ReadError
from bmoe_native.types import Streaming
from tests import tiny
from tests.cli.conftest import Terminal
from tests.fakes import INFO, ScriptedEngine

MIB = 2**20
CSRC = Path(__file__).parents[2] / "csrc"
LIBRARY = "".join((CSRC / name).read_text() for name in ("engine.cpp", "streaming.cpp"))
DECIDE = ("decide", "-m", "x.gguf", "--prefix", "p", "--choice", "A", "--choice", "B")
GENERATE = ("generate", "-m", "x.gguf", "-n", "1", "hello")
PERPLEXITY = ("perplexity", "-m", "x.gguf", "--text", "one two three")
CHAT = ("chat", "-m", "x.gguf", "-n", "1")
STREAMED = dataclasses.replace(
    INFO, is_streamed=True, reads_direct=True, streamed_bytes=17_000_000_000, cache_bytes=3000 * MIB
)
DEFAULTS = ("--dense-weights", "mmap", "--n-expert-used", "0")
UNREADABLE = "expert 5 of layer 3: cannot read 4096 bytes at 8192 of x.gguf: Input/output error"


@pytest.mark.parametrize("command", [DECIDE, GENERATE, PERPLEXITY, CHAT])
class TestEveryCommand:
    @pytest.fixture(autouse=True)
    def _nothing_is_typed(self, typed: Callable[[bytes], None]) -> None:
        typed(b"hello\n")

    def test_without_flags_nothing_streams(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        assert bmoe(*command) == 0
        assert (bmoe.opened[0][1]["streaming"], bmoe.opened[0][1]["repack"]) == (None, True)
        assert "bmoe:" not in bmoe.err

    def test_the_flags_arrive(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        flags = ("--cache-mb", "300", "--io-threads", "8", "--no-odirect", "--prefetch", "off", "--no-repack")
        flags += ("--dense-weights", "anon")
        assert bmoe(*command, "--moe-stream", *flags) == 0
        wanted = Streaming(cache_bytes=300 * MIB, io_threads=8, direct=False, prefetch="off", dense="anon")
        assert (bmoe.opened[0][1]["streaming"], bmoe.opened[0][1]["repack"]) == (wanted, False)

    def test_experts_per_token_and_a_trace_stream_or_not(
        self, bmoe: Terminal, command: tuple[str, ...], tmp_path: Path
    ) -> None:
        assert bmoe(*command) == 0
        assert (bmoe.opened[0][1]["n_expert_used"], bmoe.opened[0][1]["route_trace"]) == (0, None)
        for flags in ((), ("--moe-stream",)):
            bmoe.opened.clear()
            assert bmoe(*command, *flags, "--n-expert-used", "4", "--route-trace", str(tmp_path / "t.csv")) == 0
            assert bmoe.opened[0][1]["n_expert_used"] == 4
            assert bmoe.opened[0][1]["route_trace"].path == tmp_path / "t.csv"
        assert (tmp_path / "t.csv").read_text().startswith("phase,step,layer,")
        assert "do nothing" not in bmoe.err
        assert "without rows" not in bmoe.err

    def test_a_trace_that_cannot_be(self, bmoe: Terminal, command: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / "notes").write_text("my notes\n")
        assert bmoe(*command, "--route-trace", str(tmp_path / "notes")) == 2
        assert bmoe.err == f"bmoe: --route-trace: {tmp_path / 'notes'} holds something else: give another file\n"
        assert not bmoe.opened

    def test_a_dense_model_has_no_routes_and_that_is_said(
        self, bmoe: Terminal, command: tuple[str, ...], tmp_path: Path
    ) -> None:
        bmoe.engine = ScriptedEngine(info=dataclasses.replace(INFO, n_expert=0, n_moe_layer=0))
        assert bmoe(*command, "--route-trace", str(tmp_path / "t")) == 0
        said = f"bmoe: this model has no routed experts: {tmp_path / 't'} stays without rows\n"
        assert bmoe.err.count(said) == 1

    @pytest.mark.parametrize("flags", [(), ("--cache-mb", "auto", "--prefetch", "both", "--io-threads", "0"), DEFAULTS])
    def test_the_defaults_can_be_typed(self, bmoe: Terminal, command: tuple[str, ...], flags: tuple[str, ...]) -> None:
        assert bmoe(*command, "--moe-stream", *flags) == 0
        assert bmoe.opened[0][1]["streaming"] == Streaming()

    def test_a_flag_without_moe_stream_is_said_once(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        assert bmoe(*command, "--cache-mb", "0", "--no-odirect") == 0
        said = [line for line in bmoe.err.splitlines() if line.startswith("bmoe:")]
        assert said == ["bmoe: --cache-mb and --no-odirect do nothing without --moe-stream"]
        assert bmoe(*command, "--dense-weights", "anon") == 0
        assert "bmoe: --dense-weights does nothing without --moe-stream\n" in bmoe.err
        assert bmoe(*command, "--no-repack") == 0
        assert "bmoe:" not in bmoe.err

    @pytest.mark.parametrize("value", ["-1", "", "many", "1.5", "1e3", "0x10", "٣", "9" * 30, "2147483648", "AUTO"])
    def test_a_budget_that_is_none(self, bmoe: Terminal, command: tuple[str, ...], value: str) -> None:
        assert bmoe(*command, "--moe-stream", f"--cache-mb={value}") == 2
        wanted = f"--cache-mb must be auto or a whole number of MiB from 0 to 2147483647, not {value!r}\n"
        assert bmoe.err.endswith(wanted)
        assert not bmoe.opened

    @pytest.mark.parametrize(
        "flags",
        [
            "--io-threads 65",
            "--io-threads -1",
            "--io-threads x",
            "--prefetch all",
            "--dense-weights ram",
            "--n-expert-used -1",
            "--n-expert-used few",
        ],
    )
    def test_other_values_that_mean_nothing(self, bmoe: Terminal, command: tuple[str, ...], flags: str) -> None:
        assert bmoe(*command, "--moe-stream", *flags.split()) == 2
        assert flags.split()[0] in bmoe.err
        assert not bmoe.opened

    def test_what_cannot_be_read_is_named(self, bmoe: Terminal, command: tuple[str, ...]) -> None:
        def fail() -> None:
            raise ReadError(UNREADABLE)

        bmoe.engine = ScriptedEngine(info=STREAMED)
        bmoe.engine.during_prefill = fail
        assert bmoe(*command, "--moe-stream") == 1
        assert bmoe.err.splitlines()[-1] == f"bmoe: {UNREADABLE}"


class TestWhatIsSaid:
    def test_what_streams_with_verbose_only(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=STREAMED)
        assert bmoe(*DECIDE, "--moe-stream") == 0
        assert bmoe.err == ""
        assert bmoe(*DECIDE, "--moe-stream", "--verbose") == 0
        assert bmoe.err == (
            "bmoe: 16212 MiB of experts in 47 layers are streamed; cache: 3000 MiB, chosen from what is available; "
            "direct reads by 4 threads\n"
        )

    def test_a_budget_that_was_given_and_holds_all(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=dataclasses.replace(STREAMED, cache_bytes=20_000 * MIB))
        assert bmoe(*DECIDE, "--moe-stream", "--cache-mb", "20000", "--io-threads", "1", "--verbose") == 0
        assert "room for all of them: 20000 MiB; direct reads by 1 thread\n" in bmoe.err

    def test_direct_reads_that_are_refused(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=dataclasses.replace(STREAMED, reads_direct=False))
        assert bmoe(*DECIDE, "--moe-stream") == 0
        assert bmoe.err.startswith("bmoe: the file system refuses direct reads: ")
        assert bmoe.err.count("\n") == 1
        assert bmoe(*DECIDE, "--moe-stream", "--no-odirect") == 0
        assert bmoe.err == ""

    def test_a_machine_without_room(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=dataclasses.replace(STREAMED, cache_bytes=0))
        assert bmoe(*DECIDE, "--moe-stream") == 0
        assert bmoe.err.startswith("bmoe: too little memory is available to keep experts in")
        assert bmoe(*DECIDE, "--moe-stream", "--cache-mb", "0") == 0
        assert bmoe.err == ""

    def test_the_librarys_warnings_and_last_words_but_not_llama_cpps(self, bmoe: Terminal) -> None:
        assert all(f'"{begins}' in LIBRARY for begins in OUR_WARNINGS)
        room = "a cache of 9000 MiB is asked for, and there is room for 5000 MiB beside the model's other weights"
        template = "the model's own template is not usable: it loops"
        assertion = "/build/ggml/src/ggml.c:1234: GGML_ASSERT(a) failed"
        lines = [
            (3, room),
            (3, "load: control-looking token: 212 '</s>' was not control-type"),
            (3, template),
            (4, "llama_model_load: error loading model: missing tensor"),
            (4, assertion),
        ]

        def log() -> None:
            _, flags = bmoe.opened[-1]
            for level, text in lines:
                if level >= flags["log_level"]:
                    flags["on_log"](level, text)

        bmoe.on_open = log
        bmoe.engine = ScriptedEngine(info=STREAMED)
        assert bmoe(*DECIDE, "--moe-stream", "--cache-mb", "9000") == 0
        assert bmoe.err == f"bmoe: {room}\nbmoe: {template}\n{assertion}\n"
        assert bmoe(*DECIDE, "--verbose") == 0
        assert bmoe.err.splitlines()[: len(lines)] == [text for _, text in lines]

    def test_what_was_read_is_in_the_view_and_in_json(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=STREAMED)
        bmoe.engine.reads = {"read_bytes": MIB, "routed_bytes": 2 * MIB, "n_hits": 1, "n_misses": 1, "stall_s": 0.5}
        assert bmoe(*DECIDE, "--moe-stream") == 0
        assert bmoe.out.rstrip().endswith(" MiB read")
        assert bmoe(*DECIDE, "--moe-stream", "--prefix-cache", "off", "--json") == 0
        wanted = {"prefill_read_mib": 1.0, "prefill_routed_mib": 2.0, "prefill_stall_s": 0.5, "cache_hit_pct": 50.0}
        assert wanted.items() <= bmoe.json().items()
        assert bmoe(*PERPLEXITY, "--moe-stream", "--json") == 0
        assert wanted.items() <= bmoe.json().items()
        bmoe.engine = ScriptedEngine(info=STREAMED, script=[["one", "two", "three"]])
        bmoe.engine.reads = {"read_bytes": MIB, "routed_bytes": 2 * MIB}
        bmoe.engine.resident_bytes = 5 * MIB
        assert bmoe("generate", "-m", "x.gguf", "hello", "--json") == 0
        wanted = {"prefill_read_mib": 1.0, "read_mib": 3.0, "cache_resident_mib": 5.0, "cache_budget_mib": 3000.0}
        assert wanted.items() <= bmoe.json().items()

    def test_where_nothing_streams_all_is_0(self, bmoe: Terminal) -> None:
        assert bmoe("generate", "-m", "x.gguf", "hello", "--json") == 0
        keys = ("prefill_read_mib", "read_mib", "cache_hit_pct", "cache_resident_mib", "cache_budget_mib")
        assert [bmoe.json()[key] for key in keys] == [0.0] * 5


class TestInfo:
    def test_it_says_that_experts_can_stay_in_the_file(self, bmoe: Terminal) -> None:
        assert bmoe("info", "x.gguf") == 0
        assert "17.00 GB together, which --moe-stream leaves in the file" in " ".join(bmoe.out.split())
        assert "streaming" not in bmoe.out

    def test_it_says_what_streams_and_what_auto_came_to(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(info=STREAMED)
        assert bmoe("info", "x.gguf", "--moe-stream") == 0
        text = " ".join(bmoe.out.split())
        assert "streaming 16212 MiB of experts in 47 layers are streamed; cache: 3000 MiB, chosen from what" in text
        assert bmoe("info", "x.gguf", "--moe-stream", "--json") == 0
        assert (bmoe.json()["is_streamed"], bmoe.json()["cache_bytes"]) == (True, 3000 * MIB)


@pytest.mark.parametrize(
    ("flags", "repacked"),
    [
        ({}, "all"),
        ({"no_repack": True}, "none"),
        ({"moe_stream": True}, "dense"),
        ({"moe_stream": True, "no_repack": True, "cache_mb": "5"}, "none"),
    ],
)
def test_which_weights_are_computed_with_in_another_layout(flags: dict[str, Any], repacked: str) -> None:
    assert ExpertFlags(**flags).repacked == repacked


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("moe") / "moe.gguf", arch="qwen3moe", n_ctx_train=512)


class TestTinyModel:
    """Through the real engine."""

    ASK = ("--prefix", "A question of some length, so that experts are asked for. ", "--choice", "b", "--choice", "k")

    def run(self, *argv: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        streams = {"out": Console(file=out, width=80), "err": Console(file=err, width=80)}
        code = main(argv, Shell(**streams, environ={}))
        return code, out.getvalue(), err.getvalue()

    def decided(self, model: Path, *flags: str) -> dict[str, Any]:
        code, out, _ = self.run("decide", "-m", str(model), "-t", "1", "--json", *self.ASK, *flags)
        assert code == 0
        record = json.loads(out)
        assert isinstance(record, dict)
        return record

    def test_a_streamed_decision_has_the_bits_of_a_resident_one(self, moe: Path) -> None:
        resident = self.decided(moe, "--no-repack")
        assert resident["prefill_read_mib"] == resident["prefill_routed_mib"] == 0.0
        for flags in (("--cache-mb", "0"), (), ("--no-odirect", "--io-threads", "1", "--prefetch", "off")):
            streamed = self.decided(moe, "--moe-stream", "--no-repack", *flags)
            assert (streamed["best"], streamed["choice_logp"]) == (resident["best"], resident["choice_logp"])
            assert streamed["prefill_read_mib"] > 0 < streamed["prefill_routed_mib"]
            assert streamed["prefill_io_s"] > 0

    def test_without_a_budget_nothing_is_found_and_with_one_that_holds_all_it_is(self, moe: Path) -> None:
        again = ("--prefix-cache", "off", "--ubatch", "8")
        assert self.decided(moe, "--moe-stream", "--cache-mb", "0", "--prefetch", "off", *again)["cache_hit_pct"] == 0
        assert self.decided(moe, "--moe-stream", "--cache-mb", "100", *again)["cache_hit_pct"] > 20

    def test_generate_and_perplexity_stream(self, moe: Path) -> None:
        texts = []
        for flags in (("--no-repack",), ("--moe-stream", "--no-repack", "--cache-mb", "100")):
            code, out, _ = self.run("generate", "-m", str(moe), "-t", "1", "-n", "8", "--json", "Hello", *flags)
            assert code == 0
            record = json.loads(out)
            texts.append(record["text"])
        assert texts[0] == texts[1]
        assert record["cache_budget_mib"] == 100.0
        assert 0 < record["cache_resident_mib"] <= 100.0
        assert record["prefill_read_mib"] > 0 < record["routed_mib"]
        code, out, _ = self.run("perplexity", "-m", str(moe), "--text", "some text", "--json", "--moe-stream")
        assert code == 0
        assert json.loads(out)["prefill_read_mib"] > 0

    def test_info_and_verbose_say_what_auto_came_to(self, moe: Path) -> None:
        code, out, _ = self.run("info", str(moe), "--moe-stream", "--json")
        record = json.loads(out)
        assert (code, record["is_streamed"]) == (0, True)
        assert 0 < record["cache_bytes"] <= record["streamed_bytes"] == record["experts_bytes"]
        code, _, err = self.run("decide", "-m", str(moe), *self.ASK, "--moe-stream", "--verbose")
        assert code == 0
        assert err.count("experts in 3 layers are streamed; ") == 1

    def test_dense_weights_in_memory_change_no_bit(self, moe: Path) -> None:
        mapped = self.decided(moe, "--moe-stream", "--no-repack")
        anon = self.decided(moe, "--moe-stream", "--no-repack", "--dense-weights", "anon")
        assert (anon["best"], anon["choice_logp"]) == (mapped["best"], mapped["choice_logp"])

    def test_other_numbers_of_experts_are_another_model(self, moe: Path) -> None:
        one = self.decided(moe, "--no-repack", "--n-expert-used", "1")
        assert one["choice_logp"] != self.decided(moe, "--no-repack")["choice_logp"]
        streamed = self.decided(moe, "--no-repack", "--n-expert-used", "1", "--moe-stream")
        assert one["choice_logp"] == streamed["choice_logp"]

    @pytest.mark.parametrize(("arch", "n_used"), [("qwen3moe", "1000"), ("llama", "2")])
    def test_a_number_that_the_model_has_not_is_refused(self, tmp_path: Path, arch: str, n_used: str) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        code, _, err = self.run("decide", "-m", str(path), *self.ASK, "--n-expert-used", n_used)
        assert code == 2
        assert "expert" in err
        assert len(err.splitlines()) == 1

    def test_a_trace_has_the_bytes_of_the_result(self, moe: Path, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        plain = self.decided(moe, "--moe-stream")
        result = self.decided(moe, "--moe-stream", "--route-trace", str(path))
        assert result["choice_logp"] == plain["choice_logp"]
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(int(row["bytes"]) for row in rows) == result["prefill_routed_mib"] * MIB > 0
        assert {row["seq"] for row in rows} == {"1"}

    def test_a_dense_model_is_opened_and_that_is_said(self, tmp_path: Path) -> None:
        dense = tiny.write(tmp_path / "dense.gguf")
        code, out, err = self.run("decide", "-m", str(dense), *self.ASK, "--moe-stream", "--json")
        assert (code, json.loads(out)["prefill_read_mib"]) == (0, 0)
        assert "this model has no routed experts: nothing is streamed, all of it is in memory" in err
