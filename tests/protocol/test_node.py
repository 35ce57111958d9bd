"""The example host in Node.js, against a real session."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.protocol.fake import WAIT_S, table
from tests.protocol.host import ROOT, SESSION, environment

HOST = ROOT / "examples" / "node" / "host.mjs"


def node(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    return subprocess.run(
        [found, str(HOST), *arguments], capture_output=True, timeout=2 * WAIT_S, env=environment(), check=False
    )


def test_decide_generate_cancel_and_close(model: Path) -> None:
    done = node(*SESSION, "-m", str(model), "--decide", "-c", "8192", "-t", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["ready"]) == list(table("BMOE_READY"))
    first, second = report["decisions"]
    assert [list(first), list(second)] == [list(table("BMOE_DECIDE"))] * 2
    assert (len(first["choice_logp"]), first["n_reused"]) == (3, 0)
    assert second["n_reused"] > 0
    assert report["refusal"] == "choices must be a list of texts, not a text"
    assert list(report["turn"]) == list(table("BMOE_DONE"))
    assert "".join(report["deltas"]) == report["turn"]["text"]
    assert report["stopped"]["cancelled"]
    assert report["stopped"]["tokens"] < 100_000
    assert report["end"] == {"code": 0, "signal": None}


def test_a_session_that_does_not_open_is_an_error_with_the_reason() -> None:
    done = node(*SESSION, "-m", "/nowhere.gguf")
    assert done.returncode == 1
    assert b"host: cannot open the model /nowhere.gguf" in done.stderr


def test_a_command_that_does_not_exist_is_an_error() -> None:
    done = node("/nowhere/bmoe", "session")
    assert done.returncode == 1
    assert b"host: spawn /nowhere/bmoe ENOENT" in done.stderr
