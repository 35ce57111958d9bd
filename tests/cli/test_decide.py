import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import typer

from bmoe_native.errors import ArgumentError, EngineError, ModelError
from tests.cli.conftest import Terminal
from tests.decide.scripted import N_VOCAB, SYSTEM, ScriptedBackend

ASK = ("decide", "-m", "x.gguf", "Which team?", "--option", "billing", "--option", "sales")
RAW = ("decide", "-m", "x.gguf", "--prefix", "one two", "--suffix", " three", "--choice", "A", "--choice", "B")


def tokens(text: str) -> list[int]:
    return ScriptedBackend().text_tokens(text, add_bos=False)


def favour(bmoe: Terminal, **logits: float) -> None:
    row = np.zeros(N_VOCAB, np.float32)
    for text, value in logits.items():
        row[bmoe.engine.text_tokens(text, add_bos=False)[0]] = value
    bmoe.engine._logits = lambda pieces: row


class TestQuestion:
    def test_options_get_letters_and_bars(self, bmoe: Terminal) -> None:
        favour(bmoe, A=14, B=13)
        assert bmoe(*ASK) == 0
        lines = bmoe.out.splitlines()
        assert lines[0].startswith("> A) billing")
        assert "72.9 %" in lines[0]
        assert "█" in lines[0]
        assert lines[1].startswith("  B) sales")
        assert "outside the choices" in lines[2]
        assert "tokens" in lines[-1]
        assert all(len(line) <= 80 for line in lines)
        assert bmoe.err == ""

    def test_mass_outside_the_options_stands_out(self, bmoe: Terminal) -> None:
        favour(bmoe, Sure=20, A=18)
        assert bmoe(*ASK) == 0
        assert (
            "The model wanted to say something else: 88.1 % of its answer is outside the choices, 88.1 % on 'Sure'"
            in " ".join(bmoe.out.split())
        )
        assert any(line.startswith("!") for line in bmoe.out.splitlines())

    def test_little_mass_outside_does_not(self, bmoe: Terminal) -> None:
        favour(bmoe, A=30)
        assert bmoe(*ASK) == 0
        assert "something else" not in bmoe.out
        assert "Not sure" not in bmoe.out
        assert "!" not in bmoe.out

    def test_json_has_the_options_behind_the_letters(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK, "--json") == 0
        record = bmoe.json()
        assert record["choices"] == ["A", "B"]
        assert record["options"] == ["billing", "sales"]
        assert record["choice_logp"][record["best"]] == max(record["choice_logp"])

    @pytest.mark.parametrize("count", [27, 60, 300])
    def test_many_options_all_count(self, bmoe: Terminal, count: int) -> None:
        options = [part for number in range(count) for part in ("--option", f"thing {number}")]
        assert bmoe("decide", "-m", "x.gguf", "Which?", *options, "--json") == 0
        record = bmoe.json()
        assert len(record["choice_logp"]) == len(set(record["choices"])) == count
        assert bmoe("decide", "-m", "x.gguf", "Which?", *options) == 0
        shown = sum(") thing " in line for line in bmoe.out.splitlines())
        assert shown == min(count, 40)
        assert (f"{count - 40} others together" in bmoe.out) is (count > 40)

    @pytest.mark.parametrize("question", ["-5 or 5?", "-5", "-t or -c?x y", "--option or not?", "- or + ?"])
    def test_a_question_may_begin_with_a_dash_behind_dashes(self, bmoe: Terminal, question: str) -> None:
        assert bmoe("decide", "-m", "x.gguf", "--option", "a", "--option", "b", "--json", "--", question) == 0
        assert bmoe.prompt()[1 : 1 + len(tokens(question))] == tokens(question)

    @pytest.mark.parametrize("question", ["-5 or 5?", "-5", "-5 cats and 3 mice?", "- or + ?"])
    @pytest.mark.parametrize("first", [True, False])
    def test_a_question_may_begin_with_a_dash(self, bmoe: Terminal, question: str, first: bool) -> None:
        flags = ("--option", "a", "--option=-1", "--json", "-m", "x.gguf")
        assert bmoe("decide", *((question, *flags) if first else (*flags, question))) == 0
        assert bmoe.prompt()[1 : 1 + len(tokens(question))] == tokens(question)
        assert bmoe.json()["options"] == ["a", "-1"]

    def test_a_dash_after_a_flag_is_its_value(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "-m", "x.gguf", "Which?", "--option", "-1", "--option", "-2 or so", "--json") == 0
        assert bmoe.json()["options"] == ["-1", "-2 or so"]

    def test_a_flag_that_is_none_is_wrong_usage(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK, "--opton") == 2
        assert "No such option: --opton" in bmoe.err

    def test_options_are_never_files(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "-m", "x.gguf", "@who", "--option", "@a", "--option", "@@b", "--json") == 0
        assert bmoe.json()["options"] == ["@a", "@@b"]


class TestRequest:
    def test_it_is_passed_as_it_is(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW, "--json") == 0
        record = bmoe.json()
        assert record["choices"] == ["A", "B"]
        assert "options" not in record
        assert bmoe.prompt() == ScriptedBackend().chat_tokens([("user", "one two three")])
        assert record["n_tokens"] == record["n_prefilled"] == len(bmoe.prompt())
        assert record["model"] == "x.gguf"
        needed = ("outside_mass", "n_reused", "prefill_s", "restore_s", "store_s", "policy_s", "prefill_cpu_s")
        assert all(math.isfinite(record[key]) for key in needed)

    def test_no_template_is_raw(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW, "--no-template", "--json") == 0
        assert bmoe.prompt() == tokens("one two three")

    def test_a_choice_without_mass_is_null(self, bmoe: Terminal) -> None:
        favour(bmoe, B=-math.inf)
        assert bmoe(*RAW, "--json") == 0
        assert bmoe.json()["choice_logp"][1] is None

    def test_blanks_of_a_choice_are_seen(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "-m", "x", "--prefix", "p", "--choice", " A", "--choice", "B", "-m", "x.gguf") == 0
        assert "' A'" in bmoe.out

    def test_control_characters_are_not_sent_to_the_terminal(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "-m", "x.gguf", "q", "--option", "a\x1b[31m\nb", "--option", "[bold]c[/bold]") == 0
        assert "\x1b" not in bmoe.out
        assert "a\\x1b[31m\\nb" in bmoe.out
        assert "[bold]c[/bold]" in bmoe.out

    def test_a_system_message_and_a_template_reach_the_engine(self, bmoe: Terminal, tmp_path: Path) -> None:
        template = tmp_path / "chat.jinja"
        template.write_text("{{ messages }}")
        assert bmoe(*RAW, "--system", "be brief", "--template", str(template)) == 0
        assert SYSTEM in bmoe.prompt()
        assert bmoe.opened[0][1]["chat_template"] == "{{ messages }}"

    def test_numbers_reach_the_engine(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW, "-t", "3", "-c", "2048", "--ubatch", "64", "--prefix-cache", "off", "--verbose") == 0
        path, flags = bmoe.opened[0]
        assert path == Path("x.gguf")
        assert (flags["n_threads"], flags["n_ctx"], flags["n_ubatch"]) == (3, 2048, 64)
        assert flags["prefix_cache"] == "off"
        flags["on_log"](2, "loading [x]")

    def test_nothing_of_llama_cpp_is_logged_unless_asked(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW) == 0
        flags = bmoe.opened[0][1]
        assert flags["log_level"] == 3
        flags["on_log"](3, "load: control-looking token")
        assert bmoe.streams[1].getvalue() == ""


class TestFiles:
    def test_at_is_a_file_byte_for_byte(self, bmoe: Terminal, tmp_path: Path) -> None:
        file = tmp_path / "über uns.txt"
        file.write_bytes("café\r\n\r\n".encode())
        assert bmoe(*RAW, "--prefix", f"@{file}", "--no-template", "--json") == 0
        assert bmoe.prompt() == tokens("café\r\n\r\n three")

    def test_two_ats_are_one_in_the_text(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW, "--prefix", "@@home: light on", "--no-template", "--json") == 0
        assert bmoe.prompt() == tokens("@home: light on three")

    def test_a_missing_file_names_the_escape(self, bmoe: Terminal) -> None:
        assert bmoe(*RAW, "--prefix", "@home: light on") == 2
        assert "--prefix: cannot read 'home: light on'" in bmoe.err
        assert "write --prefix '@@home: light on'" in bmoe.err

    def test_a_missing_file_is_said_before_a_model_is_fetched(self, bmoe: Terminal) -> None:
        for flag in ("--prefix", "--suffix", "--system", "--template"):
            value = "nowhere" if flag == "--template" else "@nowhere"
            assert bmoe("decide", "--prefix", "p", "--choice", "A", flag, value) == 2
            assert f"{flag}: cannot read 'nowhere'" in bmoe.err
        assert (bmoe.fetched, bmoe.opened) == ([], [])

    @pytest.mark.parametrize("flag", ["--prefix", "--suffix", "--system"])
    def test_a_file_that_is_not_utf_8_is_refused(self, bmoe: Terminal, tmp_path: Path, flag: str) -> None:
        file = tmp_path / "latin"
        file.write_bytes(b"caf\xe9")
        assert bmoe(*RAW, flag, f"@{file}") == 2
        assert f"{flag}: {file} is not UTF-8 at byte 3" in bmoe.err

    def test_an_argument_the_locale_could_not_decode_is_still_text(self, bmoe: Terminal) -> None:
        undecoded = "👍".encode().decode("ascii", "surrogateescape")
        assert bmoe("decide", "-m", "x.gguf", "q", "--option", undecoded, "--option", "b", "--json") == 0
        assert bmoe.json()["options"] == ["👍", "b"]

    def test_an_argument_that_is_no_text_is_refused_by_name(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "-m", "x.gguf", "q", "--option", "a\udcff", "--option", "b") == 2
        assert "options[0] holds U+DCFF at character 1" in bmoe.err


class TestExitCodes:
    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("decide",), "give a question with --option"),
            (("decide", "Which?"), "a question needs --option"),
            (("decide", "--option", "a"), "a question needs --option"),
            (("decide", "-m", "x.gguf", "q", "--option", "a", "-o", " "), "--option number 2 is empty: ' '"),
            (("decide", "-m", "", "q", "--option", "a"), "the model is an empty text"),
            (("decide", "Which?", "--option", "a", "--choice", "b"), "not both"),
            (("decide", "--prefix", "p"), "--prefix and --choice"),
            (("decide", "--choice", "a"), "--prefix and --choice"),
            ((*RAW, "--no-template", "--system", "x"), "--no-template leaves nothing"),
            ((*RAW, "--no-template", "--template", "x"), "--no-template leaves nothing"),
            ((*RAW, "--out", "x"), "do nothing without --batch"),
            ((*RAW, "--restart"), "do nothing without --batch"),
            ((*RAW, "--batch", "x", "--out", "y"), "--batch takes its requests from the file"),
            (("decide", "--batch", "x"), "--batch needs --out"),
            ((*RAW, "--choice", "A "), "both begin with"),
            ((*RAW, "-t", "many"), "Invalid value for '-t'"),
            ((*RAW, "-t", "-1"), "Invalid value for '-t'"),
            (("decide", "-m", "no-such-name", "q", "-o", "a"), "there is no model named 'no-such-name'"),
            (("frobnicate",), "No such command"),
        ],
    )
    def test_refused_or_wrong_usage_is_2(self, bmoe: Terminal, argv: tuple[str, ...], says: str) -> None:
        assert bmoe(*argv) == 2
        assert says in bmoe.err
        assert bmoe.out == ""
        assert bmoe.engine.n_computed == 0
        assert bmoe(*argv, "--json") == 2
        assert says in bmoe.json()["error"]
        assert bmoe.json()["exit_code"] == 2

    @pytest.mark.parametrize(
        "argv",
        [
            ("decide", "-m", "x.gguf", "-o", "a", "-o", "A", "--choice", "b", "--", "--json"),
            ("decide", "-m", "x.gguf", "--prefix", "--json", "-o", "b"),
            ("decide", "-m", "x.gguf", "q", "-o", "--json", "-t", "many"),
        ],
    )
    def test_text_that_reads_like_a_flag_asks_for_no_json(self, bmoe: Terminal, argv: tuple[str, ...]) -> None:
        assert bmoe(*argv) == 2
        assert bmoe.out == ""

    def test_an_unknown_prefix_cache_mode_is_2(self, bmoe: Terminal) -> None:
        assert bmoe("decide", *RAW[3:], "--prefix-cache", "maybe") == 2
        assert "auto, on, off" in bmoe.err
        assert bmoe.fetched == []

    def test_a_value_the_engine_does_not_take_is_2(self, bmoe: Terminal) -> None:
        def absurd() -> None:
            raise ArgumentError("a context of 100000000 tokens is more than the 8192 this model was trained for")

        bmoe.on_open = absurd
        assert bmoe(*RAW, "-c", "100000000") == 2
        assert "8192" in bmoe.err

    def test_no_template_is_2_and_names_the_flags(self, bmoe: Terminal) -> None:
        bmoe.engine.has_template = False
        assert bmoe(*RAW) == 2
        assert "has no chat template (--template FILE, --no-template)" in bmoe.err
        assert bmoe(*RAW, "--no-template") == 0

    def test_an_engine_failure_is_1(self, bmoe: Terminal) -> None:
        def missing() -> None:
            raise ModelError("x.gguf: no such file")

        bmoe.on_open = missing
        assert bmoe(*RAW) == 1
        assert bmoe.err == "bmoe: x.gguf: no such file\n"
        assert bmoe(*RAW, "--json") == 1
        assert bmoe.json() == {"error": "x.gguf: no such file", "exit_code": 1}

    def test_a_failure_while_computing_is_1(self, bmoe: Terminal) -> None:
        def fail() -> None:
            raise EngineError("llama.cpp failed")

        bmoe.engine.during_prefill = fail
        assert bmoe(*RAW) == 1
        assert "llama.cpp failed" in bmoe.err

    def test_broken_logits_are_1(self, bmoe: Terminal) -> None:
        favour(bmoe, A=math.nan)
        assert bmoe(*RAW) == 1
        assert "logits are broken" in bmoe.err

    def test_an_interrupt_is_130(self, bmoe: Terminal) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        bmoe.engine.during_prefill = interrupt
        assert bmoe(*RAW, "--json") == 130
        assert bmoe.json() == {"error": "interrupted", "exit_code": 130}
        assert bmoe.err == "bmoe: interrupted\n"
        assert bmoe.engine.closed
        assert bmoe(*RAW) == 130
        assert bmoe.out == ""

    def test_an_abort_as_older_typers_turn_an_interrupt_into_is_130(self, bmoe: Terminal) -> None:
        def abort() -> None:
            raise typer.Abort

        bmoe.engine.during_prefill = abort
        assert bmoe(*RAW) == 130

    def test_help_is_0_and_teaches(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "--help") == 0
        text = bmoe.out
        for word in ("--option billing", "@@text", "130 interrupted", "--batch requests.jsonl", "--no-template"):
            assert word in text

    @pytest.mark.parametrize("command", [(), ("decide",), ("info",), ("models",), ("models", "fetch")])
    def test_help_fits_80_columns(
        self, bmoe: Terminal, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert bmoe(*command, "--help") == 0
        assert [line for line in bmoe.out.splitlines() if len(line) > 80] == []
        assert "[[" not in bmoe.out
        assert "..." not in bmoe.out.replace("ARGS]...", "").replace("COMMAND [", "")


class TestModel:
    def test_without_one_the_default_is_fetched_after_saying_its_size(self, bmoe: Terminal) -> None:
        assert bmoe("decide", "q", "-o", "a", "-o", "b", "--json") == 0
        assert bmoe.fetched == ["qwen2.5-coder-1.5b"]
        assert "Fetching qwen2.5-coder-1.5b (1.12 GB, once)" in bmoe.err
        assert bmoe.json()["model"] == "qwen2.5-coder-1.5b.gguf"

    def test_the_flag_wins_over_the_environment(self, bmoe: Terminal) -> None:
        bmoe.environ["BMOE_MODEL"] = "env.gguf"
        assert bmoe("decide", "q", "-o", "a", "-o", "b") == 0
        assert bmoe("decide", "q", "-o", "a", "-o", "b", "-m", "qwen2.5-coder-1.5b") == 0
        assert bmoe("decide", "q", "-o", "a", "-o", "b", "-m", "flag.gguf") == 0
        assert [path.name for path, _ in bmoe.opened] == ["env.gguf", "qwen2.5-coder-1.5b.gguf", "flag.gguf"]

    def test_an_own_file_is_not_fetched(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK) == 0
        assert bmoe.fetched == []


class TestBatch:
    LINES = (
        '{"id":1,"prefix":"p q r","suffix":" s","choices":["A","B"]}',
        '{"id":2,"question":"Which?","options":["x","y"]}',
    )

    def test_it_answers_and_says_so_on_stderr(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out))
        assert bmoe(*argv) == 0
        assert bmoe.out == ""
        assert bmoe.err == f"2 decided, 0 refused: {out}\n"
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [1, 2]
        assert len(bmoe.opened) == 1
        assert bmoe(*argv, "--json") == 0
        assert len(bmoe.opened) == 1, "a finished batch needs no model"
        assert bmoe.json() == {"n_requests": 2, "n_decided": 2, "n_refused": 0, "n_resumed": 2, "out": str(out)}

    def test_a_refused_line_makes_it_2(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(["nonsense", *self.LINES]))
        assert bmoe("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out)) == 2
        assert "2 decided, 1 refused" in bmoe.err
        assert len(out.read_text().splitlines()) == 3

    def test_an_interrupt_keeps_what_there_is(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out))

        def interrupt_the_second() -> None:
            if bmoe.engine.n_prefills > 2:
                raise KeyboardInterrupt

        bmoe.engine.during_prefill = interrupt_the_second
        assert bmoe(*argv) == 130
        assert len(out.read_text().splitlines()) == 1
        bmoe.engine.during_prefill = lambda: None
        assert bmoe(*argv) == 0
        assert "1 of them by an earlier run" in bmoe.err

    @pytest.mark.parametrize(
        "flags",
        [
            ("--system", "x"),
            ("--no-template",),
            ("-m", "other.gguf"),
            ("-c", "512"),
            ("--ubatch", "64"),
            ("--prefix-cache", "off"),
            ("--no-repack",),
            ("--n-expert-used", "4"),
            ("--moe-stream",),
        ],
    )
    def test_other_settings_are_another_batch(self, bmoe: Terminal, tmp_path: Path, flags: tuple[str, ...]) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out))
        assert bmoe(*argv) == 0
        assert bmoe(*argv, *flags) == 2
        assert "--restart" in bmoe.err
        assert bmoe(*argv, *flags, "--restart") == 0

    def test_other_threads_are_not(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out))
        assert bmoe(*argv) == 0
        assert bmoe(*argv, "-t", "1") == 0
        assert "2 of them by an earlier run" in bmoe.err

    def test_another_budget_of_streamed_experts_is_not(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out), "--moe-stream")
        assert bmoe(*argv) == 0
        flags = ("--cache-mb", "0", "--io-threads", "8", "--prefetch", "off", "--no-odirect", "--dense-weights", "anon")
        assert bmoe(*argv, *flags) == 0
        assert "2 of them by an earlier run" in bmoe.err
        assert bmoe(*argv, "--no-repack") == 2

    def test_restart_lets_go_of_the_old_results_once_the_model_is_open(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text("\n".join(self.LINES))
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out))
        assert bmoe(*argv) == 0
        before = out.read_bytes()

        def missing() -> None:
            raise ModelError("x.gguf: no such file")

        bmoe.on_open = missing
        assert bmoe(*argv, "--restart") == 1
        assert out.read_bytes() == before
        bmoe.on_open = lambda: None
        assert bmoe(*argv, "--restart") == 0
        assert "2 decided, 0 refused:" in bmoe.err
        requests.write_text("")
        assert bmoe(*argv, "--restart") == 0
        assert out.read_bytes() == b""

    def test_a_raw_line_is_refused_where_there_is_a_system_message(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
        requests.write_text('{"prefix":"p","choices":["A","B"],"template":false}\n' + self.LINES[0])
        argv = ("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(out), "--system", "be brief")
        assert bmoe(*argv) == 2
        raw, other = map(json.loads, out.read_text().splitlines())
        assert "a raw prompt has no system message" in raw["error"]
        assert other["best"] >= 0

    def test_files_that_cannot_be_used_are_said_before_a_model_is_fetched(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests = tmp_path / "r.jsonl"
        assert bmoe("decide", "--batch", str(requests), "--out", str(tmp_path / "o")) == 2
        assert "--batch: cannot read" in bmoe.err
        requests.write_text(self.LINES[0])
        assert bmoe("decide", "--batch", str(requests), "--out", str(tmp_path / "no" / "o")) == 2
        assert "--out: cannot write" in bmoe.err
        assert bmoe.fetched == []

    def test_what_fails_elsewhere_is_not_laid_on_the_results(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests = tmp_path / "r.jsonl"
        requests.write_text(self.LINES[0])

        def fail() -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        bmoe.on_open = fail
        assert bmoe("decide", "-m", "x.gguf", "--batch", str(requests), "--out", str(tmp_path / "o")) == 1
        assert "Too many open files" in bmoe.err
        assert "--out" not in bmoe.err

    def test_files_that_cannot_be_used_are_2(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests = tmp_path / "r.jsonl"
        base = ("decide", "-m", "x.gguf", "--batch")
        assert bmoe(*base, str(requests), "--out", str(tmp_path / "o")) == 2
        assert f"--batch: cannot read {requests}: No such file" in bmoe.err
        requests.write_text(self.LINES[0])
        assert bmoe(*base, str(requests), "--out", str(tmp_path / "no" / "o")) == 2
        assert "--out: cannot write" in bmoe.err
        assert bmoe(*base, str(requests), "--out", str(requests)) == 2
        assert "is the file of requests" in bmoe.err

    def test_a_full_disk_is_1(self, bmoe: Terminal, tmp_path: Path) -> None:
        requests = tmp_path / "r.jsonl"
        requests.write_text(self.LINES[0])
        assert bmoe("decide", "-m", "x.gguf", "--batch", str(requests), "--out", "/dev/full") == 1
        assert "No space left on device" in bmoe.err
