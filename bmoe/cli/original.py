"""bmoe-cli: the original's flags for hosts that start it, as a `bmoe session`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

INTERRUPTED = 130
USAGE = """usage: bmoe-cli -m MODEL --session [--decide] [FLAG ...]

Starts `bmoe session` for hosts written for the original's command line. A flag's value follows = or a blank.

  -m, --decide, --decide-prefix-cache, -t, -c, --ubatch, --system, --template,
  --moe-stream, --cache-mb, --io-threads, --no-odirect, --prefetch,
  --dense-weights, --no-repack, --n-expert-used, --prefill-device,
  --prefill-min-tokens, --prefill-loaders, --csv, --route-trace,
  --decide-probe, --progress, --verbose
                                    as in bmoe session --help
  --session                         needed: there is no other mode
  --chatml                          the model's own chat template is rendered, with this flag and without
"""
_OURS_WITH_VALUE = {
    "-m": "-m",
    "--model": "-m",
    "--decide-prefix-cache": "--decide-prefix-cache",
    "-t": "-t",
    "--threads": "-t",
    "-c": "-c",
    "--ctx": "-c",
    "--ubatch": "--ubatch",
    "--system": "--system",
    "--template": "--template",
    "--csv": "--csv",
    "--cache-mb": "--cache-mb",
    "--io-threads": "--io-threads",
    "--prefetch": "--prefetch",
    "--dense-weights": "--dense-weights",
    "--n-expert-used": "--n-expert-used",
    "--prefill-device": "--prefill-device",
    "--prefill-min-tokens": "--prefill-min-tokens",
    "--prefill-loaders": "--prefill-loaders",
    "--route-trace": "--route-trace",
    "--decide-probe": "--decide-probe",
}
_OURS = {"--decide", "--moe-stream", "--no-odirect", "--no-repack", "--progress", "--verbose"}
_UNUSED = {"--chatml": "means the model's own chat template here"}
_WITHOUT_VALUE = {"--session", "--chatml", *_OURS}


class Untranslatable(ValueError):
    """A flag, by name, that asks for what cannot be had."""


@dataclass(slots=True)
class _Translated:
    """The original's arguments as ours."""

    arguments: list[str] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once
    given: set[str] = field(default_factory=set)


def cli(argv: Sequence[str] | None = None) -> int:
    """Run a session; its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(given: list[str]) -> int:
    # Imported here, for that takes long enough to be interrupted.
    from bmoe.cli import wire
    from bmoe.cli.app import REFUSED, main
    from bmoe.cli.session import tell
    from bmoe.cli.shell import Shell
    from bmoe.serve import Outlet

    shell = Shell()
    if not given or {"-h", "--help"} & set(given):
        shell.line(USAGE.rstrip("\n"))
        return 0
    try:
        translated = _translate(given)
    except Untranslatable as error:
        tell(Outlet(wire.take_stdout()), str(error))
        shell.note(f"bmoe-cli: {error}")
        return REFUSED
    for note in translated.notes:
        shell.note(f"bmoe-cli: {note}")
    return main(["session", *translated.arguments], shell)


def _translate(given: Sequence[str]) -> _Translated:
    """Raises: Untranslatable."""
    result = _Translated()
    rest = iter(given)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in _OURS_WITH_VALUE and not equals:
            following = next(rest, None)
            if following is None:
                raise Untranslatable(f"{name} needs a value")
            value = following
        elif name in _WITHOUT_VALUE and equals:
            raise Untranslatable(f"{name} takes no value")
        _add(result, name, value)
    if "--session" not in result.given:
        raise Untranslatable("only session mode exists: add --session (for one decision there is bmoe decide)")
    if "-m" not in result.given:
        raise Untranslatable("-m MODEL is missing")
    if "--chatml" not in result.given:
        result.notes["the chat template is rendered without --chatml too, but for requests with template false"] = None
    return result


def _add(result: _Translated, name: str, value: str) -> None:
    if name in _OURS_WITH_VALUE:
        name = _OURS_WITH_VALUE[name]
        result.arguments += [name, value]
    elif name in _OURS:
        result.arguments.append(name)
    elif name in _UNUSED:
        result.notes[f"{name} {_UNUSED[name]}"] = None
    elif name != "--session":
        raise Untranslatable(f"{name!a} is unknown; see bmoe-cli --help")
    result.given.add(name)


if __name__ == "__main__":
    sys.exit(cli())
