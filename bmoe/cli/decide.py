"""bmoe decide"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bmoe import Session
from bmoe.cli.batch import BatchFlags, run_batch
from bmoe.cli.declared import shares
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.opening import (
    DecideProbeFlag,
    JsonFlag,
    ModelFlags,
    OpenFlags,
    SystemFlag,
    TemplateFlag,
    VerboseFlag,
    model_path,
    open_flags,
    open_session,
)
from bmoe.cli.prefill_device import DeviceFlags
from bmoe.cli.render import decision
from bmoe.cli.shell import Shell
from bmoe.cli.texts import behind_dashes, plain, text_or_file
from bmoe.decide import DecideRequest, Refused
from bmoe.records import Asked, result_record
from bmoe.session import check_prefix_cache

HELP = """Which of these would the model answer? One prefill, nothing is generated.

Ask a question with options, which get letters; or give the request as it is: the prompt in two halves and the
choices it may continue with. The first half, the prefix, is what a following request of a batch can reuse.

\b
Examples:
  bmoe decide "Which team should handle this? I was charged twice." \\
      --option billing --option sales
  bmoe decide --prefix @message.txt --choice Yes --choice No \\
      --suffix "Is this message spam? Answer Yes or No."
  bmoe decide --no-template --choice " Paris" --choice " Rome" \\
      --prefix "Question: What is the capital of France? Answer:"
  bmoe decide --batch requests.jsonl --out results.jsonl

\b
Texts:
  --prefix, --suffix and --system take TEXT, or @FILE for the text of a file;
  a text that begins with @ is written @@text. A question, an option or a
  choice is never a file. A question that begins with a dash can follow --.

\b
Exit codes:
  0 decided   1 the engine failed   2 refused or wrong usage   130 interrupted
"""


class Decide(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, behind_dashes(args, self.params))
        return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was asked on the command line, not checked yet."""

    question: str | None
    options: list[str] = field(default_factory=list)
    prefix: str | None
    suffix: str | None
    choices: list[str] = field(default_factory=list)
    template: bool

    @property
    def is_whole(self) -> bool:
        return self.prefix is not None or self.suffix is not None or bool(self.choices)

    @property
    def is_lettered(self) -> bool:
        return self.question is not None or bool(self.options)

    def check(self) -> None:
        """Raises: Refused, saying what to give."""
        if self.is_whole and self.is_lettered:
            raise Refused("give either a question with --option, or --prefix, --suffix and --choice, not both")
        if self.is_lettered and (self.question is None or not self.options):
            raise Refused("a question needs --option, and options need a question")
        for number, option in enumerate(self.options, start=1):
            if not option.strip():
                raise Refused(f"--option number {number} is empty: {option!r}")
        if not self.is_lettered and (not self.choices or (self.prefix is None and self.suffix is None)):
            raise Refused("give a question with --option, or --prefix and --choice; see bmoe decide --help")

    def lettered(self, session: Session) -> Asked:
        """The question as a request, its letters chosen for the session's model.

        Raises: Refused.
        """
        options = tuple(map(plain, self.options))
        request = session.lettered(plain(self.question or ""), options, template=self.template)
        return Asked(request=request, options=options)

    def whole(self) -> Asked:
        """The request as it was given, its files read.

        Raises: Refused.
        """
        request = DecideRequest(
            prefix=text_or_file("--prefix", self.prefix or ""),
            suffix=text_or_file("--suffix", self.suffix or ""),
            choices=tuple(map(plain, self.choices)),
            template=self.template,
        )
        return Asked(request=request)


@shares(ModelFlags, ExpertFlags, DeviceFlags, before="route_trace")
def decide(
    ctx: typer.Context,
    question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="What to decide, with --option.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="TEXT", help="One answer; repeat.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(metavar="TEXT", help="First half of the prompt: TEXT or @FILE.")] = None,
    suffix: Annotated[str | None, typer.Option(metavar="TEXT", help="Second half: TEXT or @FILE.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", metavar="TEXT", help="A text to score by its first token; repeat.")
    ] = None,
    system: SystemFlag = None,
    template: TemplateFlag = None,
    no_template: Annotated[bool, typer.Option("--no-template", help="The prompt is raw text.")] = False,
    batch: Annotated[str | None, typer.Option(metavar="FILE", help="Requests, one JSON object a line.")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Results of --batch; continued if there.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Write --out anew.")] = False,
    prefix_cache: Annotated[str, typer.Option(metavar="auto|on|off", help="Keep the state after a prefix.")] = "auto",
    route_trace: RouteTraceFlag = None,
    decide_probe: DecideProbeFlag = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> None:
    shell: Shell = ctx.obj
    if no_template and (template is not None or system is not None):
        raise Refused("--no-template leaves nothing for --template or --system to act on")
    given = Given(
        question=question,
        options=option or [],
        prefix=prefix,
        suffix=suffix,
        choices=choice or [],
        template=not no_template,
    )
    check_prefix_cache(prefix_cache)
    flags = open_flags(
        ctx, system=None if system is None else text_or_file("--system", system), prefix_cache=prefix_cache
    )
    if batch is None:
        if out is not None or restart:
            raise Refused("--out and --restart do nothing without --batch")
        _decide_one(shell, given, flags, as_json)
        return
    if given.is_whole or given.is_lettered:
        raise Refused(
            "--batch takes its requests from the file: no question, options, prefix, suffix or choices beside it"
        )
    if out is None:
        raise Refused("--batch needs --out FILE for the results")
    batch_flags = BatchFlags(requests=Path(batch), results=Path(out), restart=restart, template=not no_template)
    run_batch(shell, batch_flags, flags, as_json)


def _decide_one(shell: Shell, given: Given, flags: OpenFlags, as_json: bool) -> None:
    given.check()
    whole = given.whole() if given.is_whole else None  # before the model, which may take a long fetch
    path = model_path(shell, flags.model)
    with open_session(shell, path, flags) as session:
        asked = whole or given.lettered(session)
        with shell.err.status("reading the prompt"):
            result = session.decide(asked.request)
    if as_json:
        shell.emit({"model": path.name, **result_record(result, asked.options)})
        return
    ascii_only = not shell.out.encoding.lower().startswith("utf")
    shell.out.print(decision(result, asked.options, ascii_only=ascii_only, width=shell.out.width))
