"""bmoe generate"""

import select
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.status import Status
from rich.text import Text
from typer.core import TyperCommand

from bmoe.cli import render
from bmoe.cli.declared import shares, typed
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.opening import (
    JsonFlag,
    ModelFlags,
    OpenFlags,
    SystemFlag,
    TemplateFlag,
    VerboseFlag,
    cancelled_by_ctrl_c,
    interrupted,
    model_path,
    open_flags,
    open_session,
    stdin_text,
)
from bmoe.cli.prefill_device import DeviceFlags
from bmoe.cli.shell import Shell
from bmoe.cli.texts import behind_dashes, plain, text_or_file
from bmoe.decide import Refused
from bmoe.generate import GenerateRequest, Sampling, Step

HELP = """Let the model write: one answer to one prompt, shown as it comes.

The answer goes to stdout. Reasoning (--think) goes to stderr, and so does, in a terminal, what the answer took.
Without sampling flags the likeliest token is taken each time, so the same prompt gets the same answer; --temperature
above 0 draws instead, and --seed says which draw.

\b
Examples:
  bmoe generate "Name three uses of a paper clip."
  bmoe generate -n 400 --system "Answer in French." @letter.txt
  git diff | bmoe generate - --system "Summarise this diff in one line."
  bmoe generate "Tell me a joke." --temperature 0.8 --top-p 0.95 --seed 7
  bmoe generate --no-template --stop "." "The capital of France is"

\b
Texts:
  PROMPT and --system take TEXT, or @FILE for the text of a file; a text that
  begins with @ is written @@text. A PROMPT of - is read from stdin. A prompt
  that begins with a dash can follow --. A --stop is text as it is; a line
  end in one is $'\\n' in most shells.

\b
Ctrl-C ends the answer and keeps what was said. Exit codes:
  0 answered   1 engine failed   2 refused, wrong usage   130 interrupted
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags:
    """How an answer is made."""

    think: Annotated[bool, typer.Option("--think", help="Let it reason first, where its template can.")] = False
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="X", help="0: the likeliest token; above: draw, 1 as the model says."),
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", help="Draw from the N likeliest; 0: all.")] = 0
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="X", help="Draw from the likeliest that hold this mass.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="X", help="Drop what is less than X times as likely as the first.")
    ] = 0.0
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Which draw; no part in it at temperature 0.")] = 0
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeat for several.")
    ] = None

    def request(self, prompt: str, system: str | None, **others: Any) -> GenerateRequest:
        """`others` are GenerateRequest's. Raises: Refused."""
        return GenerateRequest(
            prompt=prompt,
            think=self.think,
            system=None if system is None else text_or_file("--system", system),
            sampling=Sampling(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
            ),
            stop=tuple(map(plain, self.stop or ())),
            **others,
        )


class Generate(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, behind_dashes(args, self.params))
        return parsed


@shares(AnswerFlags, ModelFlags, ExpertFlags, DeviceFlags, before="route_trace")
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer: TEXT, @FILE or - for stdin.")],
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", metavar="N", min=0, help="Write at most N tokens; 0: only read.")
    ] = 128,
    system: SystemFlag = None,
    template: TemplateFlag = None,
    no_template: Annotated[
        bool, typer.Option("--no-template", help="The prompt is raw text, to be continued.")
    ] = False,
    route_trace: RouteTraceFlag = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> None:
    answer = typed(AnswerFlags, ctx)
    if no_template and (template is not None or system is not None or answer.think):
        raise Refused("--no-template leaves nothing for --template, --system or --think to act on")
    text = stdin_text("PROMPT") if prompt == "-" else text_or_file("PROMPT", prompt)
    request = answer.request(text, system, n_predict=n_predict, template=not no_template)
    _generate(ctx.obj, request, open_flags(ctx), as_json)


def _generate(shell: Shell, request: GenerateRequest, flags: OpenFlags, as_json: bool) -> None:
    path = model_path(shell, flags.model)
    with open_session(shell, path, flags) as session, cancelled_by_ctrl_c(session):
        try:
            with Answer(shell, shown=not as_json) as answer:
                result = session.generate(request, answer.step)
        except ReaderLeft:
            return
    if as_json:
        shell.emit({"model": path.name, **asdict(result)})
    elif shell.err.is_terminal:
        shell.err.print(Text(render.turn(result), "dim"), soft_wrap=True)
    if result.cancelled:
        interrupted(as_json)


class ReaderLeft(Exception):
    """Nobody reads stdout any more."""


class Answer:
    """One answer as it comes: text on stdout, reasoning dimmed on stderr, and a spinner until the first of either."""

    def __init__(self, shell: Shell, *, shown: bool = True) -> None:
        self._shell = shell
        self._shown = shown
        self._waiting: Status = shell.err.status("reading the prompt")
        self._open_line = {"out": False, "err": False}  # whether something is written there without a line end after it

    def __enter__(self) -> "Answer":
        self._waiting.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._waiting.stop()
        self._end_reasoning()
        if self._open_line["out"]:
            self._shell.line("")

    def step(self, step: Step) -> None:
        """Raises: ReaderLeft, StdoutError."""
        if reader_left(self._shell):
            raise ReaderLeft
        if not self._shown:
            return
        if step.delta_reasoning:
            self._waiting.stop()
            self._shell.err.print(Text(render.on_screen(step.delta_reasoning), "dim"), end="", soft_wrap=True)
            self._open_line["err"] = not step.delta_reasoning.endswith("\n")
        if step.delta_text:
            self._waiting.stop()
            self._end_reasoning()
            self._say(step.delta_text)

    def _say(self, text: str) -> None:
        out = self._shell.out
        out.file.write(render.on_screen(text) if out.is_terminal else text)
        out.file.flush()
        self._open_line["out"] = not text.endswith("\n")

    def _end_reasoning(self) -> None:
        if self._open_line["err"]:
            self._shell.err.print()
            self._open_line["err"] = False


def reader_left(shell: Shell) -> bool:
    """Whether stdout is a pipe whose other end was closed."""
    try:
        descriptor = shell.out.file.fileno()
    except (OSError, ValueError):  # a stream of a test, or a closed one
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
