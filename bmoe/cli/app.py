"""The typer app, and main(), which turns exceptions into stderr and an exit code, once."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bmoe import BadLogits, FetchError, Refused
from bmoe.batch import BatchError
from bmoe.cli import bench, chat, decide, devices, generate, info, models, perplexity, probe, session
from bmoe.cli.shell import Shell
from bmoe.cli.streams import StdoutError
from bmoe.cli.texts import flags_with_value
from bmoe_native.errors import ArgumentError, EngineError, LibraryError, TemplateError

DECIDED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
_FAILURES = (EngineError, LibraryError, FetchError, BatchError, BadLogits, OSError, MemoryError)

app = typer.Typer(
    name="bmoe",
    help="Decisions from one prefill: which of these choices would the model say next?",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("decide", cls=decide.Decide, help=decide.HELP, short_help="Which of these choices would the model answer?")(
    decide.decide
)
app.command("generate", cls=generate.Generate, help=generate.HELP, short_help="Let the model write.")(generate.generate)
app.command("chat", help=chat.HELP, short_help="Talk with a model.")(chat.chat)
app.command("perplexity", help=perplexity.HELP, short_help="How well does a model foretell a text?")(
    perplexity.perplexity
)
app.command("probe", cls=decide.Decide, help=probe.HELP, short_help="How did a decision come about, layer by layer?")(
    probe.probe
)
app.command("info")(info.info)
app.command("devices")(devices.devices)
app.command("bench", help=bench.HELP, short_help="What does a decision cost, beside what it must?")(bench.bench)
app.command("session", cls=session.SessionCommand, help=session.HELP, short_help="Serve JSON lines, for programs.")(
    session.session
)
app.add_typer(models.app, name="models")


def _print_version(ctx: typer.Context, wanted: bool) -> None:
    shell: Shell = ctx.obj
    if wanted:
        shell.line("\n".join(shell.versions()))
        raise typer.Exit


@app.callback()
def bmoe(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the versions and exit."),
    ] = False,
) -> None:
    """Nothing but the flags that belong to no command."""


def main(argv: Sequence[str] | None = None, shell: Shell | None = None) -> int:
    """Run a command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    shell = shell or Shell()
    try:
        # Help, which typer prints itself, goes the way of every answer.
        with contextlib.redirect_stdout(shell.out.file):
            return _run(arguments, shell)
    except StdoutError as error:
        shell.note(f"bmoe: {error}")
        return FAILED


def _run(arguments: list[str], shell: Shell) -> int:
    try:
        returned = typer.main.get_command(app).main(arguments, prog_name="bmoe", standalone_mode=False, obj=shell)
    except (KeyboardInterrupt, typer.Abort):
        returned = INTERRUPTED
    except typer.Exit as error:
        returned = error.exit_code
    except (Refused, ArgumentError, TemplateError) as error:
        of_template = isinstance(error, TemplateError) or isinstance(error.__cause__, TemplateError)
        hint = " (--template FILE, --no-template)" if of_template else ""
        return _failed(shell, arguments, f"{error}{hint}", REFUSED)
    except _FAILURES as error:
        return _failed(shell, arguments, str(error) or type(error).__name__, FAILED)
    except Exception as error:
        # typer's own errors have no common public base; this method is what tells them.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "bmoe")
        return _failed(shell, arguments, f"{message().rstrip('.')}. See {command} --help", REFUSED)
    if returned == INTERRUPTED:  # some typers return it for a Ctrl-C
        return _failed(shell, arguments, "interrupted", INTERRUPTED)
    return returned if isinstance(returned, int) else DECIDED


def _failed(shell: Shell, arguments: list[str], message: str, code: int) -> int:
    shell.note(f"bmoe: {message}")
    if _asks_for_json(arguments):
        shell.emit({"error": message, "exit_code": code})
    return code


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether --json is a flag here, also where parsing failed: not another flag's value, nor text behind --."""
    bmoe_command: Any = typer.main.get_command(app)
    with_value = flags_with_value([param for command in bmoe_command.commands.values() for param in command.params])
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--", "--json"):
            return argument == "--json"
        if argument in with_value:
            next(rest, None)
    return False
