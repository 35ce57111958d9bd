"""Text from a command line: what is a file, what is an escape, what is not UTF-8."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bmoe.decide import Refused


def plain(argument: str) -> str:
    """An argument that is text as typed, also where the locale could not decode it."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        return argument


def text_or_file(flag: str, argument: str) -> str:
    """@FILE is the file's text, @@text is @text, everything else is text.

    Raises: Refused, naming the escape where there is no such file.
    """
    if not argument.startswith("@"):
        return plain(argument)
    if argument.startswith("@@"):
        return plain(argument[1:])
    return file_text(flag, argument[1:], hint=f"; to begin the text itself with @, write {flag} '@{argument}'")


def file_text(flag: str, path: str, *, hint: str = "") -> str:
    """The text of a file, byte for byte: line ends stay what they are.

    Raises: Refused.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{flag}: {path} is not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"{flag}: cannot read {plain(path)!r}: {reason}{hint}") from error


def behind_dashes(args: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """Arguments with a question such as '-5 or 5?' moved behind '--', where no flag is looked for.

    A question is what begins with a dash, is no value of a flag, and either has a digit next or holds a blank and
    begins like no flag of ours.
    """
    flags = {name for parameter in parameters for name in parameter.opts if name.startswith("-")}
    with_value = flags_with_value(parameters)
    kept: list[str] = []
    moved: list[str] = []
    rest = iter(args)
    for argument in rest:
        if argument == "--":
            return [*kept, "--", *moved, *rest]
        if _is_question(argument, flags):
            moved.append(argument)
            continue
        kept.append(argument)
        if argument in with_value:
            kept.extend(_next(rest))
    return [*kept, "--", *moved] if moved else kept


def flags_with_value(parameters: Sequence[Any]) -> set[str]:
    """The flags among a command's parameters that take the argument after them, whatever it looks like."""
    options = (parameter for parameter in parameters if not getattr(parameter, "is_flag", False))
    return {name for option in options for name in option.opts if name.startswith("-")}


def _is_question(argument: str, flags: set[str]) -> bool:
    if not argument.startswith("-") or len(argument) < 2:
        return False
    if argument[1].isdigit():
        return True
    is_ours = argument.split("=")[0] in flags or argument[:2] in flags
    return any(map(str.isspace, argument)) and not is_ours


def _next(rest: Any) -> list[str]:
    pick: Callable[[Any, None], str | None] = next
    value = pick(rest, None)
    return [] if value is None else [value]
