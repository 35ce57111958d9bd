import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bmoe import GenerateRequest, GenerateResult, Session
from bmoe.cli import opening
from tests.cli.conftest import Terminal
from tests.decide.scripted import USER
from tests.fakes import ScriptedEngine

ASK = ("generate", "-m", "x.gguf", "How are you?")
WAIT_S = 120  # only a hang is to end by it


def spoken(bmoe: Terminal, *words: str | bytes) -> None:
    bmoe.engine.script = [words]


def tokens(text: str) -> list[int]:
    return ScriptedEngine().text_tokens(text, add_bos=False)


def asked(bmoe: Terminal) -> list[int]:
    """The user's message in what the engine was given first."""
    return list(bmoe.engine.pieces[0][1:-1])


def press_ctrl_c(bmoe: Terminal, at: int, times: int = 1) -> None:
    """At a prefill; it goes on once the cancel has arrived, so that the next one is refused."""
    engine = bmoe.engine

    def press() -> None:
        if engine.n_prefills == at + 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            assert engine.cancelled.wait(WAIT_S)

    engine.during_prefill = press


class TestAnswer:
    def test_stdout_has_the_answer_and_a_line_end_and_nothing_else(self, bmoe: Terminal) -> None:
        spoken(bmoe, "Fine", ", thanks", ".")
        assert bmoe(*ASK) == 0
        assert (bmoe.out, bmoe.err) == ("Fine, thanks.\n", "")
        assert asked(bmoe) == tokens("How are you?")

    def test_a_line_end_of_its_own_is_enough(self, bmoe: Terminal) -> None:
        spoken(bmoe, "Fine", "\n")
        assert bmoe(*ASK) == 0
        assert bmoe.out == "Fine\n"

    def test_it_comes_as_it_is_said_in_whole_characters(self, bmoe: Terminal) -> None:
        seen: list[str] = []
        spoken(bmoe, "So", b"\xf0\x9f", b"\x98\x80", "!")
        bmoe.engine.during_prefill = lambda: seen.append(bmoe.streams[0].getvalue())
        assert bmoe(*ASK) == 0
        assert seen == ["", "So", "So", "So😀", "So😀!"]

    def test_reasoning_is_on_stderr(self, bmoe: Terminal) -> None:
        spoken(bmoe, "Hm", ".", "</think>", "Fine")
        assert bmoe(*ASK, "--think") == 0
        assert (bmoe.out, bmoe.err) == ("Fine\n", "Hm.\n")

    def test_without_think_the_template_opens_no_reasoning(self, bmoe: Terminal) -> None:
        spoken(bmoe, "Hm", "</think>", "Fine")
        assert bmoe(*ASK) == 0
        assert bmoe.out == "Hm</think>Fine\n"

    def test_a_terminal_gets_what_it_took_and_no_steering(self, bmoe: Terminal) -> None:
        bmoe.is_terminal = True
        spoken(bmoe, "\x1b[2J", "Fi\rne\n")
        assert bmoe(*ASK) == 0
        assert bmoe.out == "\\x1b[2JFi\\rne\n"
        assert "6 tokens read in 1.00 s, 2 written in" in bmoe.err
        assert "; complete" in bmoe.err

    def test_a_pipe_gets_what_was_said_byte_for_byte(self, bmoe: Terminal) -> None:
        spoken(bmoe, "\x1b[2J", "Fi\rne\n")
        assert bmoe(*ASK) == 0
        assert bmoe.out == "\x1b[2JFi\rne\n"

    @pytest.mark.parametrize(
        ("flags", "text", "ending"),
        [
            ((), "one two three", "end"),
            (("-n", "2"), "one two", "length"),
            (("--stop", "zzz", "--stop", " th"), "one two", "stop"),
            (("-n", "0"), "", "length"),
        ],
    )
    def test_json_is_the_whole_result(self, bmoe: Terminal, flags: tuple[str, ...], text: str, ending: str) -> None:
        spoken(bmoe, "one", " two", " three")
        assert bmoe(*ASK, "--json", *flags) == 0
        record = bmoe.json()
        assert set(record) == {"model", *(field.name for field in dataclasses.fields(GenerateResult))}
        assert (record["model"], record["text"], record["ending"]) == ("x.gguf", text, ending)

    def test_json_has_the_reasoning_and_stderr_has_not(self, bmoe: Terminal) -> None:
        spoken(bmoe, "Hm", "</think>", "Fine")
        assert bmoe(*ASK, "--think", "--json") == 0
        assert (bmoe.json()["reasoning"], bmoe.err) == ("Hm", "")


class TestRequest:
    def test_sampling_and_opening_flags_arrive(self, bmoe: Terminal, tmp_path: Path) -> None:
        (tmp_path / "t.jinja").write_text("{{ x }}")
        sampling = ("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--seed", "42")
        opening_flags = ("-t", "3", "-c", "99", "--ubatch", "32", "--template", str(tmp_path / "t.jinja"))
        assert bmoe(*ASK, *sampling, *opening_flags) == 0
        assert bmoe.engine.sampling == [{"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 42}]
        flags = bmoe.opened[0][1]
        assert [flags[name] for name in ("n_threads", "n_ctx", "n_ubatch", "chat_template")] == [3, 99, 32, "{{ x }}"]

    def test_the_default_is_greedy(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK) == 0
        assert bmoe.engine.sampling[0]["temperature"] == 0.0

    def test_a_prompt_from_a_file_stdin_or_with_an_at_sign(
        self, bmoe: Terminal, tmp_path: Path, typed: Callable[[bytes], None]
    ) -> None:
        (tmp_path / "p.txt").write_bytes("né\r\n".encode())
        typed("né zwei\n".encode())
        expected = {f"@{tmp_path / 'p.txt'}": "né\r\n", "-": "né zwei\n", "@@you": "@you", "-5 or 5?": "-5 or 5?"}
        for argument, text in expected.items():
            bmoe.engine.drop_state()
            assert bmoe("generate", "-m", "x.gguf", argument) == 0
            assert asked(bmoe) == tokens(text)

    def test_a_system_message_comes_first(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK, "--system", "Be brief.") == 0
        assert asked(bmoe) == [*tokens("Be brief."), USER, *tokens("How are you?")]

    def test_a_raw_prompt_has_no_template(self, bmoe: Terminal) -> None:
        assert bmoe(*ASK, "--no-template") == 0
        assert list(bmoe.engine.pieces[0]) == tokens("How are you?")

    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            (("--no-template", "--think"), "--no-template leaves nothing for"),
            (("--no-template", "--system", "x"), "--no-template leaves nothing for"),
            (("--temperature", "-1"), "temperature is -1.0, allowed are 0 to 100"),
            (("--temperature", "nan"), "temperature is nan"),
            (("--top-p", "2"), "top_p is 2.0"),
            (("--seed", "-1"), "seed is -1"),
            (("--stop", ""), "stop holds an empty text"),
            (("-n", "-1"), "'-n' / '--n-predict'"),
            (("--system", "@/nowhere"), "--system: cannot read '/nowhere'"),
            (("--json", "--top-k", "x"), "'--top-k'"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_opened(
        self, bmoe: Terminal, flags: tuple[str, ...], why: str
    ) -> None:
        assert bmoe(*ASK, *flags) == 2
        assert why in bmoe.err
        assert bmoe.opened == []
        assert ("exit_code" in bmoe.out) is ("--json" in flags)

    def test_stdin_that_is_no_text_is_refused(self, bmoe: Terminal, typed: Callable[[bytes], None]) -> None:
        typed(b"ab\xff")
        assert bmoe("generate", "-") == 2
        assert "PROMPT: stdin is not UTF-8 at byte 2" in bmoe.err

    def test_too_long_a_prompt_is_2_and_a_broken_disk_1(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(n_ctx=4)
        assert bmoe(*ASK) == 2
        assert "and the context holds 4" in bmoe.err
        assert bmoe.out == ""
        bmoe.engine = ScriptedEngine(fail_at=0)
        assert bmoe(*ASK) == 1
        assert bmoe.err == "bmoe: the disk went away\n"

    def test_a_failure_in_the_middle_leaves_a_whole_line(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(fail_at=2, script=[["one", " two", " three"]])
        assert bmoe(*ASK) == 1
        assert bmoe.out == "one two\n"


class TestCtrlC:
    def test_what_was_said_stays_and_the_code_is_130(self, bmoe: Terminal) -> None:
        spoken(bmoe, "one", " two", " three", " four")
        press_ctrl_c(bmoe, at=2)
        before = signal.getsignal(signal.SIGINT)
        assert bmoe(*ASK) == 130
        assert (bmoe.out, bmoe.err) == ("one two three\n", "bmoe: interrupted\n")
        assert signal.getsignal(signal.SIGINT) is before

    def test_json_is_the_result_so_far(self, bmoe: Terminal) -> None:
        spoken(bmoe, "one", " two", " three", " four")
        press_ctrl_c(bmoe, at=1)
        assert bmoe(*ASK, "--json") == 130
        assert (bmoe.json()["ending"], bmoe.json()["text"]) == ("cancelled", "one two")

    def test_a_second_at_once_is_the_first(self, bmoe: Terminal) -> None:
        spoken(bmoe, "one", " two", " three")
        press_ctrl_c(bmoe, at=1, times=2)
        assert bmoe(*ASK) == 130
        assert bmoe.out == "one two\n"

    def test_a_later_one_does_not_wait_for_the_engine(self, bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "INSIST_AFTER_S", -1.0)
        spoken(bmoe, "one", " two", " three")
        press_ctrl_c(bmoe, at=1, times=2)
        assert bmoe(*ASK) == 130
        assert (bmoe.out, bmoe.err) == ("one\n", "bmoe: interrupted\n")

    def test_one_that_came_before_the_request_is_not_lost(self) -> None:
        engine = ScriptedEngine(script=[["word"] * 60])
        session = Session(engine)
        with opening.cancelled_by_ctrl_c(session):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)  # the cancel finds nothing to stop
            engine.during_prefill = lambda: time.sleep(0.01)
            assert session.generate(GenerateRequest(prompt="x")).cancelled

    def test_a_sigint_that_a_parent_ignores_stays_ignored(self, bmoe: Terminal) -> None:
        seen: list[object] = []
        bmoe.engine.during_prefill = lambda: seen.append(signal.getsignal(signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            assert bmoe(*ASK) == 0
        finally:
            signal.signal(signal.SIGINT, before)
        assert set(seen) == {signal.SIG_IGN}


def test_a_reader_that_has_left_ends_the_answer() -> None:
    program = """
        import sys, time
        from bmoe import Session
        from bmoe.cli.app import main
        from bmoe.cli.shell import Shell
        from tests.fakes import ScriptedEngine

        engine = ScriptedEngine(script=[["word\\n"] * 60])
        engine.during_prefill = lambda: time.sleep(0.05)
        shell = Shell(open_session=lambda path, **flags: Session(engine), environ={})
        code = main(["generate", "-m", "x.gguf", "Go on."], shell)
        print(code, engine.n_prefills, file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    seen = subprocess.run(
        ["bash", "-c", '"$0" "$1" "$2" | head -n 1', *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    code, n_prefills = map(int, seen.stderr.split())
    assert (seen.stdout, code) == ("word\n", 0)
    assert n_prefills < 30


def real(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "bmoe.cli", *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


class TestRealEngine:
    def test_the_command_says_what_a_session_says(self, endless: Path) -> None:
        with real("generate", "-m", str(endless), "-c", "256", "-t", "1", "-n", "24", "Hello there") as process:
            out, err = process.communicate(timeout=WAIT_S)
        with Session.open(endless, n_ctx=256, n_threads=1) as session:
            said = session.generate(GenerateRequest(prompt="Hello there", n_predict=24)).text
        assert (process.returncode, err) == (0, b"")
        assert out.decode() == (said if said.endswith("\n") else said + "\n")
        assert len(said) > 4

    def test_sigint_while_it_writes(self, endless: Path) -> None:
        with real("generate", "-m", str(endless), "-c", "16384", "-t", "1", "-n", "16000", "Hello") as process:
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (130, b"bmoe: interrupted\n")
        assert (first + rest).endswith(b"\n")
        assert len(first + rest) < 12000

    def test_sigint_while_it_reads(self, endless: Path, tmp_path: Path) -> None:
        (tmp_path / "long.txt").write_text("x " * 3500)
        argv = ("-c", "16384", "--ubatch", "32", "-t", "1", "--json", "--verbose", f"@{tmp_path / 'long.txt'}")
        with real("generate", "-m", str(endless), *argv) as process:
            assert process.stderr is not None
            while b"sched_reserve: reserve took" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert time.monotonic() - began < 10
        assert b'"ending": "cancelled", "text": ""' in out


def test_help_is_0_and_teaches_within_80_columns(bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert bmoe("generate", "--help") == 0
    for word in ("git diff | bmoe generate -", "--seed 7", "@@text", "130 interrupted", "--no-template", "stderr"):
        assert word in bmoe.out
    assert [line for line in bmoe.out.splitlines() if len(line) > 80] == []
