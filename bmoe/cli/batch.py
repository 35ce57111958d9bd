"""bmoe decide --batch"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bmoe import batch
from bmoe.cli.opening import OpenFlags, model_path, open_session
from bmoe.cli.shell import Shell
from bmoe.decide import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags:
    """Where requests come from and results go."""

    requests: Path
    results: Path
    restart: bool
    template: bool


def run_batch(shell: Shell, files: BatchFlags, flags: OpenFlags, as_json: bool) -> None:
    """Answer a file of requests; the exit code is 2 where one of them was refused.

    Raises: Refused, BatchError, EngineError.
    """
    path = model_path(shell, flags.model)
    try:
        lines = batch.read_lines(files.requests, _settings(path, files, flags))
    except OSError as error:
        raise Refused(f"--batch: cannot read {files.requests}: {error.strerror}") from error
    try:
        with batch.results_file(files.results, files.requests, restart=files.restart) as descriptor:
            done = batch.resume(descriptor, files.results, lines)
            tally = _answer(shell, path, files, flags, lines, done, descriptor)
    except OSError as error:
        raise Refused(f"--out: cannot write {files.results}: {error.strerror}") from error
    _report(shell, tally, files, as_json)
    if tally.n_refused:
        raise typer.Exit(2)


def _answer(
    shell: Shell,
    path: Path,
    files: BatchFlags,
    flags: OpenFlags,
    lines: list[batch.Line],
    done: list[dict[str, Any]],
    descriptor: int,
) -> batch.Tally:
    if len(done) == len(lines):
        return batch.counted(lines, done)
    with open_session(shell, path, flags) as session:
        columns = (TextColumn("decisions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=shell.err, transient=True) as progress:
            task = progress.add_task("decisions", total=len(lines), completed=len(done))
            return batch.run(
                lines,
                done,
                descriptor,
                decide=session.decide,
                letter=session.lettered,
                template=files.template,
                on_record=lambda record: progress.advance(task),
            )


def _settings(path: Path, files: BatchFlags, flags: OpenFlags) -> dict[str, Any]:
    """What besides a request decides its answer: results under other settings are not continued."""
    return {
        "model": path.name,
        "model_bytes": path.stat().st_size if path.exists() else 0,
        "template": files.template,
        "chat_template": flags.chat_template,
        "system": flags.system,
    }


def _report(shell: Shell, tally: batch.Tally, files: BatchFlags, as_json: bool) -> None:
    if as_json:
        shell.emit(
            {
                "n_requests": tally.n_requests,
                "n_decided": tally.n_decided,
                "n_refused": tally.n_refused,
                "n_resumed": tally.n_resumed,
                "out": str(files.results),
            }
        )
        return
    resumed = f", {tally.n_resumed} of them by an earlier run" if tally.n_resumed else ""
    shell.note(f"{tally.n_decided} decided, {tally.n_refused} refused{resumed}: {files.results}")
