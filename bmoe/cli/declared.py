"""Flags that several commands have: declared once, as the fields of a class, and put into a command's signature."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

import typer

Command = Callable[..., None]
Flags = TypeVar("Flags")


def shares(*groups: type, before: str) -> Callable[[Command], Command]:
    """Declare a command's flags by dataclasses whose fields are annotated for typer, before its own parameter `before`.

    The command is not handed them: typed() has them of its context.
    """
    shared = [_parameter(field) for group in groups for field in fields(group)]

    def declare(function: Command) -> Command:
        own = inspect.signature(function).parameters
        at = list(own).index(before)
        declared = [*list(own.values())[:at], *shared, *list(own.values())[at:]]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(**{name: values[name] for name in own})

        command.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
        return command

    return declare


def typed(group: type[Flags], ctx: typer.Context) -> Flags:
    """What was typed of the flags that a class declares. Raises: what the class raises."""
    return group(**{field.name: ctx.params[field.name] for field in fields(group)})  # type: ignore[arg-type]


def _parameter(field: "Field[Any]") -> inspect.Parameter:
    assert field.default is not MISSING, field.name
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
