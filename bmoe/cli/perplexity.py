"""bmoe perplexity"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from bmoe.cli import render
from bmoe.cli.declared import shares
from bmoe.cli.experts import ExpertFlags, RouteTraceFlag
from bmoe.cli.opening import (
    JsonFlag,
    ModelFlags,
    OpenFlags,
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
from bmoe.cli.texts import file_text, plain
from bmoe.decide import Refused
from bmoe.decide.perplexity import PerplexityRequest, PerplexityResult, Scored
from bmoe.records import reads_record

HELP = """How well does a model foretell a text? Every token is scored; nothing is generated.

Perplexity is exp of the mean negative log-likelihood of a token, given those before it; lower is better, and numbers
compare only between models with the same tokenizer. A text longer than the window is scored in windows that overlap,
so that a token has at least window - stride tokens before it wherever the text has them.

\b
Examples:
  bmoe perplexity book.txt
  bmoe perplexity book.txt --window 512 --stride 256 --json
  zcat log.gz | bmoe perplexity -
  bmoe perplexity --text "The capital of France is" \\
      --choice " Paris" --choice " Rome"

\b
The text is raw: no chat template; BOS in front where the model wants one.
A choice is scored by its first token, after the whole text, as
bmoe decide --no-template scores it.

\b
Ctrl-C shows the estimate so far. Exit codes:
  0 scored   1 engine failed   2 refused, wrong usage   130 interrupted
"""


@shares(ModelFlags, ExpertFlags, DeviceFlags, before="route_trace")
def perplexity(
    ctx: typer.Context,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="The text, or - for stdin.")] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="The text itself, in place of FILE.")
    ] = None,
    window: Annotated[
        int, typer.Option("--window", metavar="N", min=0, help="Tokens of a window; 0: the context.")
    ] = 0,
    stride: Annotated[
        int, typer.Option("--stride", metavar="N", min=0, help="Tokens between windows; 0: half of one.")
    ] = 0,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", metavar="TEXT", help="Score this after the text; repeat.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --json: log p of every token, too.")] = False,
    route_trace: RouteTraceFlag = None,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> None:
    if tokens and not as_json:
        raise Refused("--tokens does nothing without --json")
    request = PerplexityRequest(
        text=_text(file, text), window=window, stride=stride, choices=tuple(map(plain, choice or ()))
    )
    shell: Shell = ctx.obj
    flags = open_flags(ctx)
    path = model_path(shell, flags.model)
    result = _scored(shell, path, request, flags)
    if as_json:
        shell.emit({"model": path.name, **record(result, request.choices, with_tokens=tokens)})
    else:
        ascii_only = not shell.out.encoding.lower().startswith("utf")
        shell.out.print(render.perplexity(result, request.choices, ascii_only=ascii_only))
    if result.cancelled:
        interrupted(as_json)


def record(result: PerplexityResult, choices: tuple[str, ...], *, with_tokens: bool) -> dict[str, Any]:
    """A scored text as a JSON object; what is no finite number is null."""
    scored = {"token_logp": [_finite(logp) for logp in result.token_logp]} if with_tokens else {}
    return {
        "cancelled": result.cancelled,
        "n_tokens": result.n_tokens,
        "n_scored": len(result.token_logp),
        "perplexity": _finite(result.perplexity),
        "nll": _finite(result.nll),
        "stderr": _finite(result.stderr),
        "choices": list(choices),
        "choice_logp": [_finite(logp) for logp in result.choice_logp],
        "n_prefilled": result.n_prefilled,
        "prefill_s": result.prefill_s,
        **reads_record(result),
        **scored,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(file: str | None, text: str | None) -> str:
    """Raises: Refused."""
    if (file is None) == (text is None):
        raise Refused("give a FILE, - for stdin, or --text; one of them")
    if text is not None:
        return plain(text)
    return stdin_text("FILE") if file == "-" else file_text("FILE", file or "")


def _scored(shell: Shell, path: Path, request: PerplexityRequest, flags: OpenFlags) -> PerplexityResult:
    so_far = TextColumn("perplexity {task.fields[perplexity]}")
    columns = (TextColumn("tokens scored"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), so_far)
    with (
        open_session(shell, path, flags) as session,
        cancelled_by_ctrl_c(session),
        shell.progress(*columns) as progress,
    ):
        task = progress.add_task("tokens scored", total=None, perplexity="...")

        def on_scored(scored: Scored) -> None:
            estimate = f"{math.exp(min(scored.nll, 700)):.2f}"
            progress.update(task, completed=scored.n_scored, total=scored.n_to_score, perplexity=estimate)

        return session.perplexity(request, on_scored)
