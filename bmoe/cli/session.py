"""bmoe session"""

import contextlib
import glob
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bmoe import Session, protocol
from bmoe.cli import wire
from bmoe.cli.declared import shares
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.narrator import Narrator
from bmoe.cli.opening import (
    DecideProbeFlag,
    ModelFlags,
    OpenFlags,
    SystemFlag,
    TemplateFlag,
    VerboseFlag,
    model_path,
    open_flags,
    opened,
    said_of,
)
from bmoe.cli.prefill_device import DeviceFlags
from bmoe.cli.shell import Shell
from bmoe.cli.texts import text_or_file
from bmoe.decide import DecideRequest, DecideResult
from bmoe.generate import GenerateRequest, GenerateResult, Step
from bmoe.probe import Probe
from bmoe.route_trace import RouteTrace
from bmoe.serve import End, Outlet, Server, Unheard, Watcher
from bmoe.trace import CsvTrace

HELP = """Serve requests that come as JSON lines on stdin; answers are lines on stdout. For programs.

\b
Requests:
  {"cmd":"decide","id":1,"prefix":"...","suffix":"...","choices":["A","B"]}
  {"cmd":"generate","id":2,"prompt":"...","n_predict":128}
  {"cmd":"cancel"}   {"cmd":"close"}

The lines, and what a host can rely on: docs/telemetry.md.

\b
Exit codes:
  0 closed   1 the engine failed   2 refused or wrong usage   130, 143 SIGINT, SIGTERM
"""
LOAD_EVERY_S = 0.1
_EXIT_CODES = {End.CLOSED: 0, End.STOPPED: 0, End.UNHEARD: 0, End.FATAL: 1}
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFlags:
    """What was asked for on the command line."""

    opening: OpenFlags
    decide: bool = False
    csv: Path | None = None
    progress: bool = False


class SessionCommand(TyperCommand):
    """Wrong usage is told on stdout too, where a host is listening."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            message = getattr(error, "format_message", None)  # what typer's own errors have in common
            if message is not None:
                tell(Outlet(wire.take_stdout()), message())
            raise
        return parsed


@shares(ModelFlags, ExpertFlags, DeviceFlags, before="csv")
def session(
    ctx: typer.Context,
    decide: Annotated[bool, typer.Option("--decide", help="Accept decisions.")] = False,
    prefix_cache: Annotated[
        str | None,
        typer.Option("--decide-prefix-cache", metavar="auto|on|off", help="Keep the state after a prefix. [auto]"),
    ] = None,
    template: TemplateFlag = None,
    system: SystemFlag = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Append a row per token and decision.")] = None,
    route_trace: RouteTraceFlag = None,
    decide_probe: DecideProbeFlag = None,
    progress: Annotated[bool, typer.Option("--progress", help="What is served, on stderr.")] = False,
    verbose: VerboseFlag = False,
) -> None:
    stdout = wire.take_stdout()
    outlet = Outlet(stdout)
    signals = wire.Signals(stdout)
    try:
        with _telling(outlet):
            opening = open_flags(
                ctx,
                prefix_cache=prefix_cache or "auto",
                system=None if system is None else text_or_file("--system", system),
            )
            flags = SessionFlags(opening=opening, decide=decide, csv=csv, progress=progress)
        if prefix_cache is not None and not decide:
            ctx.obj.note("bmoe session: --decide-prefix-cache does nothing without --decide")
        if decide_probe is not None and not decide:
            ctx.obj.note("bmoe session: --decide-probe does nothing without --decide")
        for text in opening.without_effect:
            ctx.obj.note(f"bmoe session: {text}")
        code = run(ctx.obj, flags, outlet, signals)
    except wire.Interrupted as interrupt:
        code = 128 + interrupt.number
    except Unheard:
        code = 0
    finally:
        signals.settle()
    raise typer.Exit(code)


def run(shell: Shell, flags: SessionFlags, outlet: Outlet, signals: wire.Signals) -> int:
    """Open, serve and close; the exit code.

    Raises: Refused, FetchError, EngineError and what else keeps a model from opening, after telling the host;
    Unheard, wire.Interrupted.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        with _telling(outlet):
            watchers = list(_watchers(shell, flags, stack))
            served = _open(shell, flags, outlet, started)
            stack.callback(served.close)
        load_s = time.monotonic() - started
        server = Server(
            served,
            wire.stdin(),
            outlet,
            load_s=load_s,
            watchers=watchers,
            note=lambda text: shell.note(f"bmoe session: {text}"),
        )
        signals.hand_over(on_signal=lambda number: server.stop(), on_hang_up=server.hang_up)
        outlet.send(protocol.ready(served.info, load_s=load_s, decide=flags.decide))
        end = server.run()
    if end is End.FATAL:
        shell.note("bmoe session: the engine failed, as the last BMOE_ERROR says")
    if end is End.STOPPED and signals.first is not None:
        return 128 + signals.first
    return _EXIT_CODES[end]


def _watchers(shell: Shell, flags: SessionFlags, stack: contextlib.ExitStack) -> Iterator[Watcher]:
    """Raises: Refused."""
    if flags.csv:
        yield stack.enter_context(CsvTrace(flags.csv, note=shell.note))
    if flags.opening.route_trace is not None or flags.opening.probe is not None:
        yield _Numbering(flags.opening.route_trace, flags.opening.probe)
    if flags.progress:
        yield Narrator(shell.note)


class _Numbering:
    """Numbers requests in traces as --csv does, where those that are never computed have a number, too."""

    def __init__(self, *traces: RouteTrace | Probe | None) -> None:
        self._traces = [trace for trace in traces if trace is not None]
        self._seq = 0

    def began(self, request_id: str, request: DecideRequest | GenerateRequest) -> None:
        self._seq += 1
        for trace in self._traces:
            trace.next_seq = self._seq

    def stepped(self, request_id: str, step: Step) -> None: ...
    def decided(self, request_id: str, result: DecideResult) -> None: ...
    def done(self, request_id: str, result: GenerateResult) -> None: ...
    def failed(self, request_id: str, message: str) -> None: ...


def _open(shell: Shell, flags: SessionFlags, outlet: Outlet, started: float) -> Session:
    path = model_path(shell, flags.opening.model)
    on_load = _Loading(path, outlet, started)
    session = opened(shell, path, flags.opening, command="bmoe session", decide=flags.decide, on_load=on_load)
    on_load(1.0)
    in_detail = flags.opening.verbose or flags.progress
    for text in said_of(session, flags.opening, in_detail=in_detail):
        shell.note(f"bmoe session: {text}")
    return session


class _Loading:
    """BMOE_LOAD now and then, and once at the end."""

    def __init__(self, path: Path, outlet: Outlet, started: float) -> None:
        self._mb = _model_bytes(path) / 1e6
        self._outlet = outlet
        self._started = started
        self._next = started
        self._is_whole = False

    def __call__(self, fraction: float) -> None:
        now = time.monotonic()
        if self._is_whole or (fraction < 1 and now < self._next):
            return
        self._is_whole = fraction >= 1
        self._next = now + LOAD_EVERY_S
        self._outlet.send(protocol.load(mb=self._mb * min(fraction, 1.0), ms=1000 * (now - self._started)))


def _model_bytes(path: Path) -> int:
    """Of all shards, where it is split."""
    of = _SHARD.search(path.name)
    files = path.parent.glob(f"{glob.escape(path.name[: of.start()])}-*-of-{of[1]}.gguf") if of else [path]
    return sum(file.stat().st_size for file in files if file.exists())


@contextlib.contextmanager
def _telling(outlet: Outlet) -> Iterator[None]:
    """What fails before there is a request is told the host as well as the terminal."""
    try:
        yield
    except (Exception, wire.Interrupted) as error:
        if not isinstance(error, Unheard):
            tell(outlet, str(error) or type(error).__name__)
        raise


def tell(outlet: Outlet, message: str) -> None:
    """A fatal error of no request, if somebody listens."""
    with contextlib.suppress(Unheard, OSError):
        outlet.send(protocol.error(protocol.NO_ID, message, fatal=True))
