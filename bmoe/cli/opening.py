"""From what the user typed to an open model, saying what takes long."""

from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from bmoe import Session, models
from bmoe.cli.shell import Shell
from bmoe.models import NamedModel

LOG_INFO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFlags:
    """The flags that decide how a model is opened; 0 is the engine's default."""

    model: str | None = None
    threads: int = 0
    ctx: int = 0
    ubatch: int = 0
    chat_template: str | None = None
    system: str | None = None
    prefix_cache: str = "auto"
    verbose: bool = False


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
    log = (lambda level, text: shell.note(text)) if flags.verbose else None
    with shell.err.status(f"opening {path.name}"):
        return shell.open_session(
            path,
            n_threads=flags.threads,
            n_ctx=flags.ctx,
            n_ubatch=flags.ubatch,
            chat_template=flags.chat_template,
            system=flags.system,
            prefix_cache=flags.prefix_cache,
            on_log=log,
            log_level=LOG_INFO,
        )
