"""From what the user typed to an open model, saying what takes long; and Ctrl-C while it works."""

import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from bmoe import Session, models
from bmoe.cli import experts, prefill_device
from bmoe.cli.declared import typed
from bmoe.cli.experts import ExpertFlags, NExpertUsedFlag
from bmoe.cli.prefill_device import DeviceFlags
from bmoe.cli.shell import Shell
from bmoe.cli.texts import file_text
from bmoe.decide import Refused
from bmoe.models import NamedModel
from bmoe.probe import Probe, ProbeFile
from bmoe.route_trace import RouteTrace

LOG_INFO, LOG_WARN = 2, 3
# How the library's own warnings begin. llama.cpp's are about oddities of files as they are published: --verbose.
OUR_WARNINGS = ("a cache of ", "the model's own template ")
LAST_WORDS = re.compile(r".+\.(?:c|cpp|h|hpp):\d+: ")  # of an assertion in llama.cpp, which ends the process
INSIST_AFTER_S = 1.0  # a Ctrl-C that follows within it belongs to the first
CANCEL_EVERY_S = 0.05
INTERRUPTED = 130

ModelFlag = Annotated[
    str | None, typer.Option("-m", "--model", metavar="MODEL", help="A GGUF file or a name; see bmoe models.")
]
ThreadsFlag = Annotated[int, typer.Option("-t", "--threads", metavar="N", min=0, help="0: the CPUs there are.")]
CtxFlag = Annotated[int, typer.Option("-c", "--ctx", metavar="N", min=0, help="Context in tokens; 0: up to 4096.")]
UbatchFlag = Annotated[int, typer.Option("--ubatch", metavar="N", min=0, help="Tokens computed at once; 0: 512.")]
SystemFlag = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message: TEXT or @FILE.")]
TemplateFlag = Annotated[
    str | None, typer.Option("--template", metavar="FILE", help="Jinja chat template, not the model's.")
]
VerboseFlag = Annotated[bool, typer.Option("--verbose", help="The engine's log on stderr.")]
DecideProbeFlag = Annotated[
    Path | None, typer.Option("--decide-probe", metavar="FILE", help="Append a line of JSON per decision: its layers.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Which model, and in what sizes; 0 is the engine's default."""

    model: ModelFlag = None
    threads: ThreadsFlag = 0
    ctx_tokens: CtxFlag = 0
    ubatch: UbatchFlag = 0
    n_expert_used: NExpertUsedFlag = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFlags(ModelFlags):
    """The flags that decide how a model is opened."""

    chat_template: str | None = None
    system: str | None = None
    prefix_cache: str = "auto"
    experts: ExpertFlags = field(default_factory=ExpertFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    route_trace: RouteTrace | None = None
    probe: Probe | None = None
    verbose: bool = False

    @property
    def without_effect(self) -> Iterator[str]:
        """What is to be said of flags that do nothing."""
        yield from filter(None, (self.experts.without_effect, self.device.without_effect))


def open_flags(ctx: typer.Context, **others: Any) -> OpenFlags:
    """What was typed of the flags that most commands share; `others` as they are.

    Traces are opened here, before a model that may take a long fetch, and closed when the command ends.

    Raises: Refused.
    """
    shell: Shell = ctx.obj
    experts, device = typed(ExpertFlags, ctx), typed(DeviceFlags, ctx)
    template = ctx.params.get("template")
    chat_template = None if template is None else file_text("--template", template)
    trace = ctx.params["route_trace"]
    probe = ctx.params.get("decide_probe")
    return OpenFlags(
        **asdict(typed(ModelFlags, ctx)),
        experts=experts,
        chat_template=chat_template,
        device=device,
        route_trace=None if trace is None else ctx.with_resource(RouteTrace(trace, note=shell.note)),
        probe=None if probe is None else Probe(ctx.with_resource(ProbeFile(probe, note=shell.note)).write),
        verbose=ctx.params["verbose"],
        **others,
    )


def model_path(shell: Shell, typed: str | None) -> Path:
    """The model file; a named model that is not there yet is fetched, after saying how big it is.

    Raises: Refused, FetchError.
    """
    found = models.lookup(shell.model_word(typed))
    return found if isinstance(found, Path) else fetched(shell, found)


def fetched(shell: Shell, model: NamedModel) -> Path:
    """A named model's file, fetched with a progress bar where it is missing."""
    if models.is_fetched(model, shell.cache):
        return models.path_of(model, shell.cache)
    shell.note(f"Fetching {model.name} ({model.size_bytes / 1e9:.2f} GB, once) into {shell.cache / 'models'}")
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with shell.progress(TextColumn(model.name), *columns) as progress:
        task = progress.add_task(model.name, total=model.size_bytes)
        return shell.fetch(
            model,
            shell.cache,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            on_wait=lambda: shell.note("another bmoe is fetching it: waiting for that one"),
        )


def open_session(shell: Shell, path: Path, flags: OpenFlags) -> Session:
    """Raises: Refused, EngineError."""
    for text in flags.without_effect:
        shell.note(f"bmoe: {text}")
    with shell.err.status(f"opening {path.name}"):
        session = opened(shell, path, flags)
    for text in said_of(session, flags, in_detail=flags.verbose):
        shell.note(f"bmoe: {text}")
    return session


def said_of(session: Session, flags: OpenFlags, *, in_detail: bool) -> Iterator[str]:
    """What is to be said of a model that was opened with these flags."""
    yield from experts.opened(session.info, flags.experts, in_detail=in_detail)
    yield from prefill_device.opened(session.info, flags.device, in_detail=in_detail)
    if flags.route_trace is not None and not session.info.n_moe_layer:
        yield f"this model has no routed experts: {flags.route_trace.path} stays without rows"


def opened(shell: Shell, path: Path, flags: OpenFlags, *, command: str = "bmoe", **others: Any) -> Session:
    """A session as the flags say; `others` are Session.open's. Raises: Refused, EngineError."""

    def log(level: int, text: str) -> None:
        if flags.verbose or (level > LOG_WARN and LAST_WORDS.match(text)):
            shell.note(text)
        elif level == LOG_WARN and text.startswith(OUR_WARNINGS):
            shell.note(f"{command}: {text}")

    return shell.open_session(
        path,
        n_threads=flags.threads,
        n_ctx=flags.ctx_tokens,
        n_ubatch=flags.ubatch,
        chat_template=flags.chat_template,
        system=flags.system,
        prefix_cache=flags.prefix_cache,
        streaming=flags.experts.streaming,
        repack=flags.experts.repack,
        n_expert_used=flags.n_expert_used,
        prefill_device=flags.device.name,
        prefill_min_tokens=flags.device.prefill_min_tokens or 0,
        prefill_loaders=flags.device.prefill_loaders or 0,
        route_trace=flags.route_trace,
        probe=flags.probe,
        on_log=log,
        log_level=LOG_INFO if flags.verbose else LOG_WARN,
        **others,
    )


class Cancellable(Protocol):
    """What serves a request: a Session."""

    def cancel(self) -> None: ...


@contextmanager
def cancelled_by_ctrl_c(session: Cancellable) -> Iterator[None]:
    """Within it Ctrl-C cancels what the session serves, which ends with a result; where it does not, another raises.

    A parent that ignores SIGINT for us, as nohup does, is left to it, and so is whoever is not the main thread.
    """
    found = signal.getsignal(signal.SIGINT)
    if found in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    presses = _Presses(session)
    signal.signal(signal.SIGINT, presses.handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, found)
        presses.end()


class _Presses:
    """Ctrl-C as calls of cancel(), from a thread of its own: the main one may hold the session's lock just then."""

    def __init__(self, session: Cancellable) -> None:
        self._session = session
        self._first_at: float | None = None
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() is allowed in a signal handler
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._wakes.put(True)
        elif now - self._first_at > INSIST_AFTER_S:
            raise KeyboardInterrupt

    def end(self) -> None:
        self._over.set()
        self._wakes.put(False)
        self._watcher.join()

    def _watch(self) -> None:
        if not self._wakes.get():
            return
        self._session.cancel()
        while not self._over.wait(CANCEL_EVERY_S):  # the first may have come before the session began to serve
            self._session.cancel()


def stdin_text(what: str) -> str:
    """All of stdin, byte for byte.

    Raises: Refused.
    """
    if sys.stdin is None:
        raise Refused(f"{what}: stdin is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{what}: stdin is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise Refused(f"{what}: cannot read stdin: {error.strerror}") from error


def interrupted(as_json: bool) -> None:
    """End the command as one that Ctrl-C stopped, after what it had was shown.

    Raises: typer.Exit; SystemExit where that was a JSON object, for main() would add one that says no more.
    """
    if as_json:
        raise SystemExit(INTERRUPTED)
    raise typer.Exit(INTERRUPTED)
