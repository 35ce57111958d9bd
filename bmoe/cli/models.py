"""bmoe models"""

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from bmoe import models
from bmoe.cli.opening import fetched, model_path
from bmoe.cli.shell import Shell
from bmoe.cli.wire import Interrupted
from bmoe.upcycle import UpcycleRequest, clear_partial
from bmoe.upcycle import upcycle as write_upcycled

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(help="Named models: list, fetch, path, verify; make one of experts.", rich_markup_mode=None)

Name = Annotated[str | None, typer.Argument(help="A name from bmoe models list; the default model if left out.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("list")
def list_models(ctx: typer.Context, as_json: Json = False) -> None:
    """What can be fetched by name, and what is here already."""
    shell: Shell = ctx.obj
    if as_json:
        shell.emit({"models": [_record(shell, model) for model in models.CATALOG]})
        return
    table = Table.grid(padding=(0, 2))
    for model in models.CATALOG:
        marks = ("default" if model is models.DEFAULT else "", "here" if models.is_fetched(model, shell.cache) else "")
        table.add_row(*map(Text, (model.name, f"{model.size_bytes / 1e9:.2f} GB", *marks, model.summary)))
    shell.out.print(table)


@app.command(short_help="Fetch a model into the cache and print its path.")
def fetch(ctx: typer.Context, name: Name = None, as_json: Json = False) -> None:
    """Fetch a model into the cache, unless it is there, and print its path."""
    shell: Shell = ctx.obj
    model = _named(name)
    path = fetched(shell, model)
    if as_json:
        shell.emit(_record(shell, model))
    else:
        shell.line(str(path))


@app.command("path")
def path_of(ctx: typer.Context, name: Name = None, as_json: Json = False) -> None:
    """Where a model is, or would be; exit code 1 if it is not there."""
    shell: Shell = ctx.obj
    model = _named(name)
    if as_json:
        shell.emit(_record(shell, model))
    else:
        shell.line(str(models.path_of(model, shell.cache)))
    if not models.is_fetched(model, shell.cache):
        shell.note(f"{model.name} is not fetched yet: bmoe models fetch {model.name}")
        raise typer.Exit(1)


@app.command(short_help="Compare a fetched model's sha256 with the published one.")
def verify(ctx: typer.Context, name: Name = None, as_json: Json = False) -> None:
    """Read a fetched model whole and compare its sha256 with the published one."""
    shell: Shell = ctx.obj
    model = _named(name)
    with shell.err.status(f"reading {model.name}"):
        digest = models.verify(model, shell.cache)
    if as_json:
        shell.emit({**_record(shell, model), "sha256": digest})
    else:
        shell.line(f"{model.name} is whole: sha256 {digest}")


@app.command(short_help="Make a Mixture-of-Experts model of a dense one.")
def upcycle(
    ctx: typer.Context,
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="A GGUF of the family llama or qwen2, or a name.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The GGUF to write.")],
    experts: Annotated[int, typer.Option("--experts", metavar="E", help="Experts in each layer.")],
    used: Annotated[int, typer.Option("--used", metavar="K", help="Experts that a token uses.")],
    noise: Annotated[
        float,
        typer.Option("--noise", metavar="S", help="How far experts differ, relative to each weight; 0: not at all."),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="What routers and noise are drawn from.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Make a Mixture-of-Experts model of a dense one: its FFN as every expert, and routers drawn at random.

    Without noise it answers what the dense model answers. Needs the package gguf, the extra [tools].

    OUT is called .OUT.partial until it is whole. A run that fails or is stopped removes that; one that is killed
    leaves it, and the next run that writes OUT takes it over.
    """
    shell: Shell = ctx.obj
    request = UpcycleRequest(
        source=Path(dense),
        target=out,
        n_expert=experts,
        n_expert_used=used,
        noise=noise,
        seed=seed,
        overwrite=force,
    )
    request = dataclasses.replace(request, source=model_path(shell, dense))  # a fetch, maybe: the rest is right by now
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _cleared_when_stopped(shell, out, as_json), shell.progress(TextColumn(out.name), *columns) as progress:
        task = progress.add_task(out.name, total=None)
        made = write_upcycled(request, lambda done, total: progress.update(task, completed=done, total=total))
    if as_json:
        shell.emit({**dataclasses.asdict(made), "path": str(made.path)})
    else:
        shell.line(str(made.path))


@contextmanager
def _cleared_when_stopped(shell: Shell, out: Path, as_json: bool) -> Iterator[None]:
    """Within it a signal that would end the process ends the command, and nothing half written stays beside out.

    The first one is what counts: another, while things are cleared away, changes nothing. One that a parent ignores
    for us, as nohup does, is left to it, and so is whoever is not the main thread.
    """
    stopped = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Interrupted(number)

    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in STOPPING if is_main}
    ours = [number for number, handler in found.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    except Interrupted as error:
        clear_partial(out)  # it may have come before the writer had the file in its care
        if error.number == signal.SIGINT:
            raise
        shell.note(f"bmoe: {error}")
        code = 128 + error.number
        if as_json:
            shell.emit({"error": str(error), "exit_code": code})
        raise typer.Exit(code) from error
    finally:
        for number in ours:
            signal.signal(number, found[number])


def _named(name: str | None) -> models.NamedModel:
    return models.DEFAULT if name is None else models.named(name)


def _record(shell: Shell, model: models.NamedModel) -> dict[str, str | int | bool]:
    return {
        "name": model.name,
        "default": model is models.DEFAULT,
        "size_bytes": model.size_bytes,
        "fetched": models.is_fetched(model, shell.cache),
        "path": str(models.path_of(model, shell.cache)),
        "summary": model.summary,
    }
