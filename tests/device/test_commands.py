"""The commands over a device for tests, which only a door of their own lets them have."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bmoe import Session
from bmoe.cli.app import main
from bmoe.cli.shell import Shell
from bmoe_native import Engine
from tests import tiny
from tests.device.server import Server

UBATCH = 64
TEXT = ("Some text of many words, that is long enough for several pieces of a prompt. " * 4)[:-30]  # with a narrow end
FLAGS = ("-t", "1", "--ubatch", str(UBATCH), "--no-repack", "--json")
COMMANDS = {
    "decide": ("--no-template", "--prefix", TEXT, "--choice", "a", "--choice", "b", "--prefix-cache", "off"),
    "generate": ("--no-template", "-n", "4", TEXT),
    "perplexity": ("--text", TEXT, "--tokens", "--choice", "a"),
}
ANSWERS = ("choice_logp", "outside_mass", "text", "token_logp", "perplexity", "n_prompt", "n_prefilled")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("moe") / "m.gguf", arch="qwen3moe", n_ctx_train=2048)


class Terminal:
    """bmoe, with a server's device behind the name Fixture."""

    def __init__(self, server: Server) -> None:
        self._device = server.name()
        self.err = ""

    def __call__(self, *argv: str) -> dict[str, Any]:
        out, err = io.StringIO(), io.StringIO()
        shell = Shell(out=Console(file=out), err=Console(file=err, width=200), environ={}, open_session=self._open)
        assert main(argv, shell) == 0, err.getvalue()
        self.err = err.getvalue()
        record = json.loads(out.getvalue())
        assert isinstance(record, dict)
        return record

    def _open(self, path: Path, *, prefill_device: str, system: str | None, **flags: Any) -> Session:
        of_session = {name: flags.pop(name) for name in ("prefix_cache", "route_trace", "probe")}
        device = self._device if prefill_device == "Fixture" else prefill_device
        return Session(Engine.open(path, prefill_device=device, **flags), system=system, **of_session)


@pytest.mark.parametrize("stream", [(), ("--moe-stream", "--cache-mb", "0")])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_as_on_the_cpu(command: str, stream: tuple[str, ...], path: Path, server: Server) -> None:
    bmoe = Terminal(server)
    argv = (command, "-m", str(path), *FLAGS, *stream, *COMMANDS[command])
    wanted = bmoe(*argv)
    got = bmoe(*argv, "--prefill-device", "Fixture", "--prefill-loaders", "1")
    assert bmoe.err == "" or "direct reads" in bmoe.err
    assert {key: got[key] for key in ANSWERS if key in got} == {key: wanted[key] for key in ANSWERS if key in wanted}
    assert set(got) == set(wanted)
    assert not any(value for key, value in wanted.items() if key.startswith("prefill_dev_"))
    n_computed = got["n_prompt" if command == "generate" else "n_prefilled"]
    assert 3 * UBATCH < got["prefill_dev_tokens"] < n_computed
    assert got["prefill_dev_routed"] >= got["prefill_dev_demand"] > 0 < got["prefill_dev_nodes"]
    assert (got["prefill_dev_read_mib"] > 0) == bool(stream)
    narrow = bmoe(*argv, "--prefill-device", "Fixture", "--prefill-min-tokens", str(UBATCH + 1))
    assert narrow["prefill_dev_tokens"] == 0
    assert {key: narrow[key] for key in ANSWERS if key in narrow} == {key: got[key] for key in ANSWERS if key in got}


def test_one_that_does_not_open_is_said_in_one_line(path: Path, server: Server) -> None:
    bmoe = Terminal(server)
    argv = ("decide", "-m", str(path), *FLAGS, *COMMANDS["decide"])
    wanted = bmoe(*argv)
    got = bmoe(*argv, "--prefill-device", "Nonesuch7")
    assert bmoe.err.startswith("bmoe: prefill runs on the CPU: there is no device Nonesuch7 here")
    assert bmoe.err.count("\n") == 1
    assert (got["choice_logp"], got["prefill_dev_tokens"]) == (wanted["choice_logp"], 0)


def test_a_batch_that_a_device_began_is_not_continued_on_the_cpu(path: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "r").write_text(json.dumps({"prefix": TEXT, "suffix": "?", "choices": ["a", "b"], "template": False}))
    argv = ("decide", "-m", str(path), "--json", "--batch", str(tmp_path / "r"), "--out", str(tmp_path / "o"))
    bmoe = Terminal(server)
    device = ("--prefill-device", "Fixture")
    assert bmoe(*argv, *device)["n_resumed"] == 0
    assert bmoe(*argv, *device)["n_resumed"] == 1
    with pytest.raises(AssertionError, match="is no result of request 1 with this model and these settings"):
        bmoe(*argv)
