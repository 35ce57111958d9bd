"""A shell whose streams are strings and whose models are scripted."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bmoe import Session
from bmoe.cli.app import main
from bmoe.cli.shell import Shell
from bmoe.models import NamedModel, path_of
from bmoe_native.types import Device, Streaming
from tests.fakes import ScriptedEngine


@dataclass
class Terminal:
    """bmoe at width 80, and what it was seen to do."""

    cache: Path
    environ: dict[str, str]
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    opened: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""
    on_open: Callable[[], None] = lambda: None
    is_terminal: bool = False
    streams: tuple[io.StringIO, io.StringIO] = field(default_factory=lambda: (io.StringIO(), io.StringIO()))
    build_info: Callable[[], str] = lambda: "bmoe 1.2.3, llama.cpp abc"
    devices: Callable[[], list[Device]] = list

    def __call__(self, *argv: str) -> int:
        self.streams = out, err = io.StringIO(), io.StringIO()
        shell = Shell(
            out=Console(file=out, width=80, highlight=False, force_terminal=self.is_terminal),
            err=Console(file=err, width=80, highlight=False, force_terminal=self.is_terminal),
            environ=self.environ,
            open_session=self._open,
            inspect=self._inspect,
            fetch=self._fetch,
            build_info=self.build_info,
            devices=self.devices,
        )
        try:
            code = main(argv, shell)
        except SystemExit as error:
            code = int(error.code or 0)
        self.out, self.err = out.getvalue(), err.getvalue()
        return code

    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.out.count("\n") == 1
        assert self.out.isascii()
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def prompt(self) -> list[int]:
        """What the engine computed last, as tokens."""
        return [token for piece in self.engine.pieces for token in piece]

    def _open(self, path: Path, **flags: Any) -> Session:
        self.opened.append((path, flags))
        self.on_open()
        self.engine.closed = False
        return Session(self.engine, prefix_cache=flags["prefix_cache"], system=flags["system"])

    def _inspect(self, path: Path, *, inspect: bool, streaming: Streaming | None) -> ScriptedEngine:
        assert inspect == (streaming is None)
        self.opened.append((path, {"streaming": streaming}))
        return self.engine

    def _fetch(self, model: NamedModel, cache: Path, **hooks: Any) -> Path:
        self.fetched.append(model.name)
        hooks["on_progress"](model.size_bytes, model.size_bytes)
        return path_of(model, cache)


@pytest.fixture
def bmoe(tmp_path: Path) -> Terminal:
    cache = tmp_path / "cache"
    return Terminal(cache=cache, environ={"BMOE_CACHE": str(cache)})


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """What is piped into stdin."""

    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))

    return pipe


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose turns end when they are told to, and only then."""
    from tests import tiny

    def head(rows: Any) -> Any:
        rows[[index for index, token in enumerate(tiny.vocabulary()[0]) if token.startswith("<|")]] = 0
        return rows

    return tiny.write(tmp_path_factory.mktemp("endless") / "tiny.gguf", n_ctx_train=16384, head=head)
