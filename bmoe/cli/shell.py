"""What the commands get from outside: streams, environment, and ways to a model. Injected in tests."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from bmoe import Session, models
from bmoe.cli.streams import Stderr, Stdout
from bmoe_native import Engine, build_info, devices
from bmoe_native.errors import LibraryError
from bmoe_native.types import Device


def console(*, stderr: bool = False) -> Console:
    """A console that writes what its stream's encoding lacks as escapes."""
    stream = sys.stderr if stderr else sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    guarded = Stderr(stream) if stderr else Stdout(stream)
    return Console(file=cast(IO[str], guarded), highlight=False, markup=False, emoji=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """Answers go to out, everything else to err."""

    out: Console = field(default_factory=console)
    err: Console = field(default_factory=lambda: console(stderr=True))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    open_session: Callable[..., Session] = Session.open
    inspect: Callable[..., Any] = Engine.open
    fetch: Callable[..., Path] = models.fetch
    build_info: Callable[[], str] = build_info
    devices: Callable[[], Sequence[Device]] = devices

    @property
    def cache(self) -> Path:
        """BMOE_CACHE, or the default."""
        set_to = self.environ.get("BMOE_CACHE")
        return Path(set_to) if set_to else models.default_cache()

    def model_word(self, typed: str | None) -> str | None:
        """What names the model: the flag, else BMOE_MODEL, else nothing, which is the default model."""
        return typed if typed is not None else self.environ.get("BMOE_MODEL") or None

    def versions(self) -> list[str]:
        """Of this package, and of the library with what is in it, or why there is none."""
        try:
            package = importlib.metadata.version("bmoe")
        except importlib.metadata.PackageNotFoundError:
            package = "(not installed)"
        try:
            library = self.build_info()
        except LibraryError as error:
            library = f"none: {error}"
        return [f"bmoe {package}", f"library: {library}"]

    def progress(self, *columns: ProgressColumn) -> Progress:
        """A bar on stderr that goes away when done. Not in a file, where all that is left of it are blank lines."""
        shown = self.err.is_terminal
        # Quiet as well as disabled: older riches end even a disabled bar with a line.
        where = self.err if shown else Console(quiet=True)
        return Progress(*columns, console=where, transient=True, disable=not shown)

    def note(self, text: str) -> None:
        """A line of prose to stderr, never wrapped: it may hold paths and hashes."""
        self.err.print(Text(text), soft_wrap=True)

    def emit(self, value: Mapping[str, Any]) -> None:
        """One JSON object on one line of stdout; ASCII, so that any stdout can carry it."""
        self.line(json.dumps(value, allow_nan=False))

    def line(self, text: str) -> None:
        """One line of stdout as it is, without wrapping or styles.

        Raises: StdoutError.
        """
        self.out.file.write(text + "\n")
        self.out.file.flush()
