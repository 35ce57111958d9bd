"""Not one byte on stdout but the protocol's, whatever happens."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.protocol.fake import WAIT_S, answers
from tests.protocol.host import FLAGS, ROOT, SESSION, decide, environment, hosted, run


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-m", "/nowhere.gguf"), 1, "cannot open the model /nowhere.gguf"),
        (("-m", str(ROOT / "README.md")), 1, ""),
        (("-m", "no-such-name"), 2, "no-such-name"),
        (("-m", "x.gguf", "--moe"), 2, "No such option: --moe"),
        (("-m", "x.gguf", "-t", "many"), 2, "-t"),
        (("-m", "x.gguf", "-t", "-1"), 2, "-t"),
        (("-m",), 2, "-m"),
        (("-m", "x.gguf", "extra"), 2, "extra"),
        (("-m", "x.gguf", "--template", "/nowhere.jinja"), 2, "--template: cannot read '/nowhere.jinja'"),
        (("-m", "x.gguf", "--csv", "/nowhere/x.csv"), 2, "--csv: cannot write /nowhere/x.csv"),
        (("-m", "x.gguf", "--decide-prefix-cache", "perhaps"), 2, "prefix_cache must be one of"),
    ],
)
def test_what_fails_at_the_start(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*SESSION, *arguments)
    assert done.returncode == code
    ((tag, record),) = answers(done.stdout)
    assert (tag, record["id"], record["fatal"]) == ("ERROR", None, True)
    assert message in record["msg"]
    assert b"Traceback" not in done.stderr
    assert b"bmoe: " in done.stderr


def test_what_a_library_prints(model: Path) -> None:
    code = (
        "import os, subprocess, sys, warnings, bmoe.serve as serve\n"
        "decided = serve.protocol.decided\n"
        "def noisy(*args):\n"
        "    print('printed'); os.write(1, b'written\\n'); warnings.warn('warned')\n"
        "    subprocess.run(['echo', 'echoed'])\n"
        "    return decided(*args)\n"
        "serve.protocol.decided = noisy\n"
        "from bmoe.cli.app import main\n"
        "sys.exit(main())"
    )
    done = run(sys.executable, "-c", code, "session", "-m", str(model), *FLAGS, data=json.dumps(decide(1)).encode())
    assert answers(done.stdout)[-1][0] == "DECIDE"
    for word in (b"printed", b"written", b"warned", b"echoed"):
        assert word in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(model: Path, closed: str) -> None:
    command = " ".join([*SESSION, "-m", str(model), *FLAGS])
    done = run("bash", "-c", f"{command} {closed}", data=json.dumps(decide(1)).encode())
    tags = [tag for tag, _ in answers(done.stdout) if tag != "LOAD"]
    if ">&-" in closed.replace("2>&-", ""):
        assert (done.returncode, tags) == (1, [])
        assert b"Traceback" not in done.stderr
    elif "<&-" in closed:
        assert (done.returncode, tags) == (0, ["READY"])
    else:
        assert (done.returncode, tags) == (0, ["READY", "BEGIN", "DECIDE"])


def test_a_full_disk_behind_it(model: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*SESSION, "-m", str(model), *FLAGS], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE,
            env=environment(), cwd=ROOT, check=False, timeout=WAIT_S,
        )  # fmt: skip
    assert process.returncode == 1
    assert b"No space left" in process.stderr
    assert b"Traceback" not in process.stderr


def test_a_parent_that_made_its_ends_non_blocking(model: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    theirs.setblocking(False)
    with hosted(*SESSION, "-m", str(model), *FLAGS, stdin=theirs, stdout=theirs) as host:
        theirs.close()
        lines = [json.dumps({"cmd": "x" * 30}).encode() + b"\n"] * 5000
        threading.Thread(target=ours.sendall, args=(b"".join(lines) + b'{"cmd":"close"}\n',), daemon=True).start()
        time.sleep(1)  # until the answers have filled what the kernel holds of them
        data = b""
        while piece := ours.recv(65536):
            data += piece
        assert host.wait() == 0
    ours.close()
    assert sum(tag == "ERROR" for tag, _ in answers(data)) == 5000


def test_a_flag_that_does_nothing_is_said(model: Path) -> None:
    done = run(*SESSION, "-m", str(model), "-c", "512", "--decide-prefix-cache", "on")
    assert done.returncode == 0
    assert done.stderr.decode() == "bmoe session: --decide-prefix-cache does nothing without --decide\n"


@pytest.mark.parametrize(
    ("error", "message", "code", "has_trace"),
    [
        ("bmoe_native.errors.EngineError('llama.cpp failed')", "llama.cpp failed", 1, False),
        ("KeyError('oops')", "KeyError: 'oops'", 1, True),
    ],
)
def test_a_failure_is_fatal(model: Path, error: str, message: str, code: int, has_trace: bool) -> None:
    program = (
        "import sys, bmoe, bmoe_native.errors\n"
        f"def fail(self, request): raise {error}\n"
        "bmoe.Session.decide = fail\n"
        "from bmoe.cli.app import main\n"
        "sys.exit(main())"
    )
    data = b"\n".join(json.dumps(decide(number)).encode() for number in (1, 2))
    done = run(sys.executable, "-c", program, "session", "-m", str(model), *FLAGS, data=data)
    assert done.returncode == code
    parsed = answers(done.stdout)
    assert ("ERROR", {"id": 1, "fatal": True, "msg": message}) in parsed
    assert not any(tag == "DECIDE" for tag, _ in parsed)
    assert (b"Traceback" in done.stderr) is has_trace
