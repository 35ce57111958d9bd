"""bmoe chat"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer
from rich.text import Text

from bmoe import BadLogits, Session
from bmoe.cli import render
from bmoe.cli.declared import shares, typed
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.generate import Answer, AnswerFlags, ReaderLeft
from bmoe.cli.opening import (
    ModelFlags,
    SystemFlag,
    TemplateFlag,
    VerboseFlag,
    cancelled_by_ctrl_c,
    interrupted,
    model_path,
    open_flags,
    open_session,
)
from bmoe.cli.prefill_device import DeviceFlags
from bmoe.cli.shell import Shell
from bmoe.cli.texts import plain
from bmoe.decide import Refused
from bmoe.generate import GenerateRequest, GenerateResult
from bmoe_native.errors import ArgumentError

HELP = """Talk with a model. Each message is answered in the light of what was said before.

\b
While you chat:
  /new     forget what was said and begin anew
  /help    these lines
  /quit    leave; so do Ctrl-D, and Ctrl-C twice
  Ctrl-C   end the answer that is being written; what was said stays said
  A line that ends in a backslash goes on in the next.
  A message that begins with / is written with two: //etc is a folder.

\b
Examples:
  bmoe chat
  bmoe chat -m my-model.gguf --system "You are a patient teacher." -c 8192
  printf 'My name is Ada.\\nWhat is my name?\\n' | bmoe chat

From a pipe, each line is a turn; one that is refused does not stop the others, and stdout has nothing but the answers.

\b
Exit codes:
  0 left   1 the engine failed   2 wrong usage; from a pipe: a turn refused
  130 interrupted; from a terminal only while the model is being opened
"""
COMMANDS = HELP.partition("While you chat:\n")[2].partition("\n\n")[0]
FIRST, NEXT = "> ", ". "
_CUT = {
    "length": "cut off after {n} tokens: -n",
    "context": "cut off: the context is full; /new, or -c for a larger one",
}


@shares(AnswerFlags, ModelFlags, ExpertFlags, DeviceFlags, before="route_trace")
def chat(
    ctx: typer.Context,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", metavar="N", min=1, help="Write at most N tokens an answer.")
    ] = 1024,
    system: SystemFlag = None,
    template: TemplateFlag = None,
    route_trace: RouteTraceFlag = None,
    verbose: VerboseFlag = False,
) -> None:
    shell: Shell = ctx.obj
    like = typed(AnswerFlags, ctx).request("", system, n_predict=n_predict)
    flags = open_flags(ctx)
    path = model_path(shell, flags.model)
    lines = _typed(shell) if sys.stdin is not None and sys.stdin.isatty() else _piped
    with open_session(shell, path, flags) as session:
        Chat(shell=shell, session=session, like=like, lines=lines, by_hand=lines is not _piped).run(path.name)


Lines = Callable[[str], str | None]
"""A prompt → the next line without its end, or None at the end."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation line by line."""

    shell: Shell
    session: Session
    like: GenerateRequest  # every turn's, but for its prompt and where it begins
    lines: Lines
    by_hand: bool
    begun: bool = field(default=False, init=False)
    n_refused: int = field(default=0, init=False)

    def run(self, model: str) -> None:
        """Raises: EngineError; typer.Exit, for any exit code but 0."""
        if self.by_hand:
            self.shell.note(f"{model}. /help shows the commands, Ctrl-D leaves.")
        try:
            while (message := self._message()) is not None and self._obey_or_answer(message):
                pass
        except ReaderLeft:
            return
        if self.n_refused and not self.by_hand:
            raise typer.Exit(2)

    def _message(self) -> str | None:
        """What to do next; None at the end."""
        warned = False
        while True:
            try:
                message = self._joined()
            except KeyboardInterrupt:
                if not self.by_hand:
                    raise
                if not warned:
                    warned = True
                    self.shell.note("\nCtrl-C again or Ctrl-D leaves, /help shows the commands")
                    continue
                message = None
            if message is None and self.by_hand:
                self.shell.note("")  # the shell's prompt on a line of its own
            return message

    def _joined(self) -> str | None:
        """A line and those that continue it."""
        line = self.lines(FIRST)
        message = line
        while line is not None and line.endswith("\\"):
            line = self.lines(NEXT)
            message = f"{(message or '')[:-1]}\n{line}" if line is not None else (message or "")[:-1]
        return message

    def _obey_or_answer(self, message: str) -> bool:
        """Whether the chat goes on."""
        word = message.strip()
        if word == "/quit":
            return False
        if word == "/new":
            self.begun = False
            self._remark("a new conversation")
        elif word == "/help":
            self.shell.note(COMMANDS)
        elif word.startswith("/") and not word.startswith("//"):
            self._refuse(
                f"no such command: {word.split()[0]}; a message that begins with / is written /{word.split()[0]}"
            )
        elif word:
            self._answer(message.replace("/", "", 1) if word.startswith("//") else message)
        return True

    def _answer(self, prompt: str) -> None:
        begins = not self.begun
        try:
            request = replace(self.like, prompt=prompt, clear_kv=begins, system=self.like.system if begins else None)
            with cancelled_by_ctrl_c(self.session), Answer(self.shell) as answer:
                result = self.session.generate(request, answer.step)
        except (Refused, ArgumentError, BadLogits) as error:
            self._refuse(f"{error}{'' if begins else ' (/new forgets what was said)'}")
            return
        self.begun = self.begun or not result.cancelled or bool(result.text)
        self._tell_ending(result)

    def _tell_ending(self, result: GenerateResult) -> None:
        if result.cancelled and not self.by_hand:
            interrupted(as_json=False)
        if result.cancelled and not result.text:
            self.shell.note("")  # behind the ^C
        elif result.ending in _CUT:
            self._remark(_CUT[result.ending].format(n=result.n_generated))
        elif not result.text:
            self._remark("the model said nothing")
        if self.by_hand:
            self._remark(render.turn(result))

    def _refuse(self, why: str) -> None:
        self.n_refused += 1
        self.shell.note(f"bmoe: {why}")

    def _remark(self, text: str) -> None:
        self.shell.err.print(Text(text, "dim"), soft_wrap=True)


def _piped(_prompt: str) -> str | None:
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        return None
    return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")


def _typed(shell: Shell) -> Lines:
    """Lines from a person: with readline's keys and history where stdout is the terminal, too."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it from here on

    def read(prompt: str) -> str | None:
        if not shell.out.is_terminal:  # then input() would write its prompt into the answers
            shell.err.print(Text(prompt), end="")
            prompt = ""
        try:
            return plain(input(prompt))
        except EOFError:
            return None

    return read
