"""bmoe decide --batch"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from bmoe import Session, batch
from bmoe.cli.opening import OpenFlags, model_path, open_session
from bmoe.cli.shell import Shell
from bmoe.decide import Refused
from bmoe_native.types import Info


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
    # Both files before the model, which may take a long fetch.
    with _or_refused(f"--batch: cannot read {files.requests}"):
        requests = files.requests.read_bytes()
    with ExitStack() as held:
        with _or_refused(f"--out: cannot write {files.results}"):
            descriptor = held.enter_context(batch.results_file(files.results, files.requests))
        path = model_path(shell, flags.model)
        # Whether a device computes is known when the model is open, and decides which results can be continued.
        session = held.enter_context(open_session(shell, path, flags)) if flags.device.name else None
        settings = _settings(path, files, flags) | (_of_device(session.info, flags) if session else {})
        lines = batch.read_lines(requests, settings)
        with _or_refused(f"--out: cannot continue {files.results}"):
            done = [] if files.restart else batch.resume(descriptor, files.results, lines)
        if len(done) == len(lines) and not files.restart:
            tally = batch.counted(lines, done)
        else:
            session = session or held.enter_context(open_session(shell, path, flags))
            tally = _answer(shell, session, files, flags, lines, done, descriptor)
    _report(shell, tally, files, as_json)
    if tally.n_refused:
        raise typer.Exit(2)


def _answer(
    shell: Shell,
    session: Session,
    files: BatchFlags,
    flags: OpenFlags,
    lines: list[batch.Line],
    done: list[dict[str, Any]],
    descriptor: int,
) -> batch.Tally:
    if files.restart:
        batch.clear(descriptor)  # not before: a model that cannot be opened would have cost the old results
    columns = (TextColumn("decisions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with shell.progress(*columns) as progress:
        task = progress.add_task("decisions", total=len(lines), completed=len(done))
        return batch.run(
            lines,
            done,
            descriptor,
            decide=session.decide,
            letter=session.lettered,
            template=files.template,
            system=flags.system,
            on_record=lambda record: progress.advance(task),
        )


@contextmanager
def _or_refused(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{what}: {error.strerror}") from error


def _settings(path: Path, files: BatchFlags, flags: OpenFlags) -> dict[str, Any]:
    """What besides a request decides its answer: results under other settings are not continued.

    Not the threads, nor what is kept of streamed experts: they change no bit.
    """
    # Defaults have no key: results of before there was another are continued.
    repacked = {} if flags.experts.repacked == "all" else {"repacked": flags.experts.repacked}
    n_expert_used = {"n_expert_used": flags.n_expert_used} if flags.n_expert_used else {}
    return {
        "model": path.name,
        "model_bytes": path.stat().st_size if path.exists() else 0,
        "template": files.template,
        "chat_template": flags.chat_template,
        "system": flags.system,
        "n_ctx": flags.ctx_tokens,
        "n_ubatch": flags.ubatch,
        "prefix_cache": flags.prefix_cache,
        **repacked,
        **n_expert_used,
    }


def _of_device(info: Info, flags: OpenFlags) -> dict[str, Any]:
    """The same of a device that was asked for; one that is not there decides nothing."""
    repacked = {} if info.repack else {"repacked": "none"}
    if not info.prefill_device:
        return repacked
    return {**repacked, "prefill_device": info.prefill_device, "prefill_min_tokens": flags.device.min_tokens}


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
