import contextlib
import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bmoe import GenerateRequest, Session
from bmoe.cli.chat import Chat
from bmoe.cli.shell import Shell
from bmoe.decide.backend import ChatMessage
from bmoe_native.types import Prompt
from tests.cli.conftest import Terminal
from tests.fakes import ScriptedEngine

CHAT = ("chat", "-m", "x.gguf")
WAIT_S = 120  # only a hang is to end by it
Type = Callable[[bytes], None]


class Listening(ScriptedEngine):
    """What was asked, each time with what came before it."""

    def __init__(self, *script: Sequence[str], **backend: object) -> None:
        super().__init__(script=script, **backend)
        self.asked: list[list[ChatMessage]] = []

    def render(self, messages: Sequence[ChatMessage], *, reasoning: bool = False) -> Prompt:
        self.asked.append(list(messages))
        return super().render(messages, reasoning=reasoning)

    @property
    def prompts(self) -> list[str]:
        return [messages[-1][1] for messages in self.asked]


def listening(bmoe: Terminal, *script: Sequence[str], **backend: object) -> Listening:
    bmoe.engine = engine = Listening(*script, **backend)
    return engine


class TestPipe:
    def test_each_line_is_a_turn_after_those_before(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, ["Hi", "!"], ["Ada", "."])
        typed(b"I am Ada.\r\nWho am I?")
        assert bmoe(*CHAT) == 0
        assert (bmoe.out, bmoe.err) == ("Hi!\nAda.\n", "")
        first = ("user", "I am Ada.")
        assert engine.asked == [[first], [first, ("assistant", "Hi!"), ("user", "Who am I?")]]

    def test_new_starts_over_with_the_system_message(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, ["A"], ["B"], ["C"])
        typed(b"one\ntwo\n/new\nthree\n")
        assert bmoe(*CHAT, "--system", "Be brief.") == 0
        system = ("system", "Be brief.")
        assert engine.asked[1] == [system, ("user", "one"), ("assistant", "A"), ("user", "two")]
        assert engine.asked[2] == [system, ("user", "three")]

    def test_quit_leaves_what_follows_unread(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe)
        typed(b"one\n/quit\ntwo\n")
        assert bmoe(*CHAT) == 0
        assert engine.prompts == ["one"]

    def test_lines_that_go_on_blank_ones_and_slashes(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe)
        typed(b"a\\\n  b\\\nc\n\n   \n//etc is a folder\n  //x\nn\xc3\xa9\nend\\\n")
        assert bmoe(*CHAT) == 0
        assert engine.prompts == ["a\n  b\nc", "/etc is a folder", "  /x", "né", "end"]

    def test_help_is_on_stderr(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe)
        typed(b"/help\n")
        assert bmoe(*CHAT) == 0
        assert "/new     forget what was said" in bmoe.err
        assert (bmoe.out, engine.asked) == ("", [])

    def test_a_command_that_is_none_is_no_turn_and_2(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, ["A"])
        typed(b"/reset now\none\n")
        assert bmoe(*CHAT) == 2
        assert bmoe.err == "bmoe: no such command: /reset; a message that begins with / is written //reset\n"
        assert (engine.prompts, bmoe.out) == (["one"], "A\n")

    def test_a_turn_that_is_refused_says_why_and_the_chat_goes_on(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, ["A"], ["B"], n_ctx=12)
        typed(b"one\n" + b"x " * 20 + b"\n\xff\nthree\n")
        assert bmoe(*CHAT, "--system", "Be brief.") == 2
        too_long, not_text = bmoe.err.splitlines()
        assert "and the context holds 12" in too_long
        assert too_long.endswith("(/new forgets what was said)")
        assert "surrogate" in not_text
        assert bmoe.out == "A\nB\n"
        assert engine.asked[-1] == [
            ("system", "Be brief."), ("user", "one"), ("assistant", "A"), ("user", "three")
        ]  # fmt: skip

    def test_a_first_turn_that_is_refused_does_not_begin_the_conversation(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, n_ctx=12)
        typed(b"x " * 20 + b"\ntwo\n")
        assert bmoe(*CHAT, "--system", "Be brief.") == 2
        assert engine.asked[-1] == [("system", "Be brief."), ("user", "two")]
        assert "/new" not in bmoe.err

    def test_reasoning_is_on_stderr(self, bmoe: Terminal, typed: Type) -> None:
        listening(bmoe, ["Hm", "</think>", "Yes"])
        typed(b"one\n")
        assert bmoe(*CHAT, "--think") == 0
        assert (bmoe.out, bmoe.err) == ("Yes\n", "Hm\n")

    def test_an_answer_that_was_cut_off_says_so(self, bmoe: Terminal, typed: Type) -> None:
        listening(bmoe, ["one", " two", " three"])
        typed(b"go\n")
        assert bmoe(*CHAT, "-n", "2") == 0
        assert (bmoe.out, bmoe.err) == ("one two\n", "cut off after 2 tokens: -n\n")

    def test_ctrl_c_ends_it_with_130(self, bmoe: Terminal, typed: Type) -> None:
        engine = listening(bmoe, ["one", " two", " three"], ["never"])

        def press() -> None:
            if engine.n_prefills == 2:
                signal.raise_signal(signal.SIGINT)
                assert engine.cancelled.wait(WAIT_S)

        engine.during_prefill = press
        typed(b"go\nmore\n")
        assert bmoe(*CHAT) == 130
        assert bmoe.out == "one two\n"

    def test_an_engine_that_failed_ends_it_with_1(self, bmoe: Terminal, typed: Type) -> None:
        listening(bmoe, ["one"], fail_at=0)
        typed(b"go\nmore\n")
        assert bmoe(*CHAT) == 1
        assert bmoe.err == "bmoe: the disk went away\n"


class ByHand:
    """A chat whose lines are a list; an exception in it is raised, a callable called first."""

    def __init__(self, engine: ScriptedEngine, *lines: str | type[BaseException], system: str | None = None) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.prompts: list[str] = []
        self._lines = iter(lines)
        shell = Shell(out=Console(file=self.out, width=80), err=Console(file=self.err, width=80))
        like = GenerateRequest(prompt="", system=system)
        Chat(shell=shell, session=Session(engine), like=like, lines=self._read, by_hand=True).run("x.gguf")

    def _read(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line


class TestByHand:
    def test_the_end_of_input_leaves(self) -> None:
        engine = Listening(["A"])
        chat = ByHand(engine, "a\\", "b")
        assert chat.prompts == ["> ", ". ", "> "]
        assert chat.out.getvalue() == "A\n"
        first, stats, last = chat.err.getvalue().splitlines()
        assert first == "x.gguf. /help shows the commands, Ctrl-D leaves."
        assert "1 written" in stats
        assert last == ""

    def test_ctrl_c_at_the_prompt_hints_and_twice_leaves(self) -> None:
        engine = Listening()
        once = ByHand(engine, KeyboardInterrupt, "one", KeyboardInterrupt, "two")
        assert engine.prompts == ["one", "two"]
        assert once.err.getvalue().count("Ctrl-C again or Ctrl-D leaves") == 2
        engine = Listening()
        twice = ByHand(engine, KeyboardInterrupt, KeyboardInterrupt, "never")
        assert engine.prompts == []
        assert twice.err.getvalue().count("Ctrl-C again or Ctrl-D leaves") == 1

    def test_ctrl_c_in_a_continued_message_drops_it(self) -> None:
        engine = Listening()
        ByHand(engine, "a\\", KeyboardInterrupt, "b")
        assert engine.prompts == ["b"]

    @pytest.mark.parametrize(("at", "said"), [(0, ""), (1, "one two")])
    def test_ctrl_c_in_an_answer_returns_to_the_prompt(self, at: int, said: str) -> None:
        engine = Listening(["one", " two", " three"], ["B"])

        def press() -> None:
            if engine.n_prefills == at + 1:
                signal.raise_signal(signal.SIGINT)
                assert engine.cancelled.wait(WAIT_S)
                engine.cancel_at = 0  # the reading of the prompt, if that is where we are

        engine.during_prefill = press
        chat = ByHand(engine, "go", "more", system="S")
        assert "; cancelled\n" in chat.err.getvalue()
        assert chat.out.getvalue() == (f"{said}\nB\n" if said else "one two three\n")
        past = [("user", "go"), ("assistant", said)] if said else []
        assert engine.asked[-1] == [("system", "S"), *past, ("user", "more")]

    def test_refusals_leave_the_exit_code_alone(self) -> None:
        chat = ByHand(Listening(), "/nonsense")  # run() raises typer.Exit for any other
        assert "no such command: /nonsense" in chat.err.getvalue()


class Pty:
    """bmoe in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\x00\x50\x00\x00\x00\x00\x00")
        owner = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", owner, sys.executable, "-m", "bmoe.cli", *argv],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = self.taken = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, text: str) -> None:
        """Wait for text; what came up to it, and it, is taken."""
        end = time.monotonic() + WAIT_S
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen[-500:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        self.taken += before + text

    def ended(self) -> int:
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the terminal went with its last process
                    os.read(self.master, 4096)
        return self.process.returncode


@pytest.fixture
def pty(endless: Path) -> Iterator[Pty]:
    pty = Pty("chat", "-m", str(endless), "-c", "16384", "-t", "1", "-n", "16000")
    yield pty
    pty.process.kill()
    pty.process.wait()
    os.close(pty.master)


class TestTerminal:
    def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(self, pty: Pty) -> None:
        pty.until("> ")
        for _ in range(2):
            pty.type("hello\n")
            pty.until("hello\r\n")
            while len(pty.seen) < 200:
                pty.seen += os.read(pty.master, 4096).decode("utf-8", "replace")
            pty.type("\x03")
            pty.until("; cancelled")
            pty.until("> ")
        pty.type("/quit\n")
        assert pty.ended() == 0

    def test_ctrl_c_twice_at_the_prompt_leaves(self, pty: Pty) -> None:
        for _ in range(2):
            pty.until("> ")
            time.sleep(0.3)  # CPython misses, until the next key, a signal between readline's prompt and its wait
            pty.type("\x03")
        assert pty.ended() == 0
        assert "Ctrl-C again or Ctrl-D leaves" in pty.taken

    def test_ctrl_d_leaves_and_an_earlier_line_comes_back(self, pty: Pty) -> None:
        pytest.importorskip("readline")
        pty.until("> ")
        pty.type("/help\n")
        pty.until("/new     forget")
        pty.until("> ")
        pty.type("\x1b[A\n")  # the up key
        pty.until("/new     forget")
        pty.until("> ")
        pty.type("\x04")
        assert pty.ended() == 0


def test_a_real_model_goes_on_from_what_was_said(endless: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bmoe.cli", "chat", "-m", str(endless), "-c", "512", "-t", "1", "-n", "12"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=b"hello\nthere\n",
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    with Session.open(endless, n_ctx=512, n_threads=1) as session:
        said = [
            session.generate(GenerateRequest(prompt=prompt, n_predict=12, clear_kv=prompt == "hello")).text
            for prompt in ("hello", "there")
        ]
    assert done.stdout.decode() == "".join(text if text.endswith("\n") else f"{text}\n" for text in said)
    assert b"\x1b" not in done.stderr


def test_help_is_0_and_teaches_within_80_columns(bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert bmoe("chat", "--help") == 0
    for word in ("/new", "/quit", "Ctrl-C", "backslash", "| bmoe chat", "130 interrupted"):
        assert word in bmoe.out
    assert [line for line in bmoe.out.splitlines() if len(line) > 80] == []
