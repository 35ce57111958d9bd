"""bmoe probe"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from bmoe import BadLogits, Session, batch
from bmoe.cli import probe_view, render
from bmoe.cli.decide import Given
from bmoe.cli.declared import shares
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.opening import (
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
from bmoe.cli.shell import Shell
from bmoe.cli.texts import text_or_file
from bmoe.decide import DecideResult, Refused
from bmoe.probe import Probe, ProbeFile, Record, read
from bmoe.probe.pictures import Album
from bmoe.probe.record import described
from bmoe.probe.summary import Summary
from bmoe.records import Asked, asked, read_object
from bmoe.session import check_prefix_cache

HELP = """How did a decision come about? Each layer's answer, and which experts were used.

Decides as bmoe decide does, and shows what each layer would have answered, from which one the answer stays, how
concentrated the routing is, and what a cache of experts would have served. It changes no answer.

\b
Examples:
  bmoe probe "Which team should handle this? I was charged twice." \\
      --option billing --option sales
  bmoe probe --batch requests.jsonl --record probe.jsonl
  bmoe probe --from probe.jsonl --png pictures

A file to show is written by --record, or by --decide-probe of bmoe decide and bmoe session: docs/probe.md.

\b
Exit codes:
  0 shown   1 the engine failed   2 refused or wrong usage   130 interrupted
"""
MOST_LENSES = 12  # pictures of single decisions


@dataclass(slots=True, kw_only=True)
class _Shown:
    """What was shown so far, and how."""

    shell: Shell
    as_json: bool
    album: Album | None
    total: Summary = field(default_factory=Summary)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    n_lenses: int = 0

    @property
    def ascii_only(self) -> bool:
        return not self.shell.out.encoding.lower().startswith("utf")

    def add(self, record: Record, options: Sequence[str] | None = None, *, in_detail: bool = False) -> None:
        """Show a decision. Raises: Refused, for one that those before it have nothing in common with."""
        came = self.total.add(record)
        number = self.total.n_decisions
        if self.album is not None and record.lens is not None and self.n_lenses < MOST_LENSES:
            self.pictures += self.album.lens(record, f"lens-{number}", options)
            self.n_lenses += 1
        if self.as_json:
            self.decisions.append(_decision(record, options) | (asdict(came) if came else {}))
            return
        view = probe_view.strip(
            record, came, f"{number}", options, ascii_only=self.ascii_only, width=self.shell.out.width
        )
        self.shell.out.print(view)
        if in_detail and came is not None:
            self.shell.out.print(probe_view.by_layer(record, came, options, ascii_only=self.ascii_only))

    def refuse(self, line: int, why: str) -> None:
        self.refused.append({"line": line, "error": why})
        self.shell.note(f"bmoe probe: line {line}: {why}")

    def end(self, model: str | None) -> None:
        """All decisions together; and the exit code, where some were refused. Raises: typer.Exit."""
        if self.album is not None:
            self.pictures += self.album.summary(self.total)
            self.shell.note(f"{len(self.pictures)} pictures drawn{self._left_out()}")
        if self.as_json:
            self.shell.emit(self._object(model))
        elif self.total.n_decisions:
            self.shell.out.print(probe_view.summary(self.total, ascii_only=self.ascii_only))
        else:
            self.shell.note("no decisions to show")
        if self.refused:
            raise typer.Exit(2)

    def _left_out(self) -> str:
        agreed = self.total.agreement
        n_more = agreed.n_decisions - self.n_lenses if agreed else 0
        return f"; the lens of the first {MOST_LENSES} decisions only" if n_more else ""

    def _object(self, model: str | None) -> dict[str, Any]:
        agreed, rates = self.total.agreement, self.total.hit_rates()
        return {
            "model": model,
            "decisions": self.decisions,
            "agreement": asdict(agreed) if agreed else None,
            "layer_uses": [asdict(use) for use in self.total.layer_uses],
            "hit_rates": asdict(rates) if rates else None,
            "refused": self.refused,
            "pictures": [str(path) for path in self.pictures],
        }


@shares(ModelFlags, ExpertFlags, DeviceFlags, before="route_trace")
def probe(
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
    requests: Annotated[
        Path | None, typer.Option("--batch", metavar="FILE", help="Requests, one JSON object a line.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show what was recorded; opens no model.")
    ] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Append a line of JSON per decision.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw pictures; needs matplotlib.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="DIR", help="The same as SVG.")] = None,
    prefix_cache: Annotated[
        str, typer.Option(metavar="auto|on|off", help="Keep the state after a prefix; what is restored is not probed.")
    ] = "off",
    route_trace: RouteTraceFlag = None,
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
    asks = given.is_whole or given.is_lettered
    if asks + (requests is not None) + (recorded is not None) > 1:
        raise Refused("a request, --batch and --from are three ways to ask: give one")
    if recorded is not None and record is not None:
        raise Refused("--record does nothing with --from")
    check_prefix_cache(prefix_cache)
    folders = {kind: folder for kind, folder in (("png", png), ("svg", svg)) if folder is not None}
    shown = _Shown(shell=shell, as_json=as_json, album=Album(folders) if folders else None)
    if recorded is not None:
        _show_recorded(shown, recorded)
        return
    if requests is None:
        given.check()
    flags = open_flags(
        ctx, system=None if system is None else text_or_file("--system", system), prefix_cache=prefix_cache
    )
    file = None if record is None else ctx.with_resource(ProbeFile(record, flag="--record", note=shell.note))
    if requests is None:
        _show_one(shown, given, flags, file)
    else:
        _show_batch(shown, requests, flags, file, template=not no_template)


def _show_one(shown: _Shown, given: Given, flags: OpenFlags, file: ProbeFile | None) -> None:
    """Raises: Refused, EngineError."""
    whole = given.whole() if given.is_whole else None  # before the model, which may take a long fetch
    path = model_path(shown.shell, flags.model)
    with _Probed(shown.shell, path, flags, file) as probed:
        asked_for = whole or given.lettered(probed.session)
        with shown.shell.err.status("reading the prompt"):
            result, record = probed.decide(asked_for)
    if not shown.as_json:
        out = shown.shell.out
        out.print(render.decision(result, asked_for.options, ascii_only=shown.ascii_only, width=out.width))
    shown.add(record, asked_for.options, in_detail=True)
    shown.end(path.name)


def _show_batch(shown: _Shown, requests: Path, flags: OpenFlags, file: ProbeFile | None, *, template: bool) -> None:
    """Raises: Refused, EngineError."""
    try:
        lines = batch.read_lines(requests.read_bytes(), {})
    except OSError as error:
        raise Refused(f"--batch: cannot read {requests}: {error.strerror}") from error
    path = model_path(shown.shell, flags.model)
    columns = (TextColumn("decisions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _Probed(shown.shell, path, flags, file) as probed, shown.shell.progress(*columns) as progress:
        task = progress.add_task("decisions", total=len(lines))
        for line in lines:
            try:
                fields = read_object(line.text)
                fields.pop("id", None)
                asked_for = asked(fields, probed.session.lettered, template=template, system=flags.system)
                record = probed.decide(asked_for)[1]
            except (Refused, BadLogits) as error:
                shown.refuse(line.number, str(error))
            else:
                shown.add(record, asked_for.options)
            progress.advance(task)
    shown.end(path.name)


class _Probed:
    """A session whose decisions come with their records."""

    def __init__(self, shell: Shell, path: Path, flags: OpenFlags, file: ProbeFile | None) -> None:
        self._file = file
        self._seen: Record | None = None
        self._held = ExitStack()
        self.session: Session = self._held.enter_context(
            open_session(shell, path, replace(flags, probe=Probe(self._observe)))
        )

    def __enter__(self) -> "_Probed":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def decide(self, request: Asked) -> tuple[DecideResult, Record]:
        """Raises: Refused, BadLogits, EngineError."""
        result = self.session.decide(request.request)
        assert self._seen is not None
        return result, self._seen

    def _observe(self, record: Record) -> None:
        self._seen = record
        if self._file is not None:
            self._file.write(record)


def _show_recorded(shown: _Shown, path: Path) -> None:
    """Raises: Refused."""
    for record in _recorded(path):
        shown.add(record)
    shown.end(None)


def _recorded(path: Path) -> Iterator[Record]:
    try:
        yield from read(path)
    except OSError as error:
        raise Refused(f"--from: cannot read {path}: {error.strerror}") from error


def _decision(record: Record, options: Sequence[str] | None) -> dict[str, Any]:
    return {
        **described(record),
        **({} if options is None else {"options": list(options)}),
        "lens_why": record.lens_why or None,
    }
