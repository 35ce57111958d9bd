"""bmoe as a process whose standard streams are full, closed, or read by nobody."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ASK = ("decide", "-m", "x.gguf", "Which team?", "--option", "billing", "--option", "sales")
LIST = ("models", "list", "--json")
WAIT_S = 120  # only a hang is to end by it
# A process with its own standard streams, and a scripted engine behind them.
PROGRAM = """
    import sys
    from bmoe import Session
    from bmoe.cli.app import main
    from bmoe.cli.shell import Shell
    from tests.fakes import ScriptedEngine

    def open_session(path, *, prefix_cache, system, on_log, **flags):
        if on_log:
            on_log(2, "log " * 100)
        return Session(ScriptedEngine(), prefix_cache=prefix_cache, system=system)

    sys.exit(main(shell=Shell(open_session=open_session, environ={})))
"""


def shell(redirections: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    """Run bmoe with these arguments in a shell that redirects its streams; `{}` stands for bmoe."""
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *argv]
    names = " ".join(f'"${{{number}}}"' for number in range(1, len(program) + 1))
    return subprocess.run(
        ["bash", "-c", redirections.format(names), "bash", *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.fixture
def batch(tmp_path: Path) -> tuple[str, ...]:
    lines = ({"prefix": "one two", "suffix": f" {number}", "choices": ["A", "B"]} for number in range(4))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ("decide", "-m", "x.gguf", "--batch", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "o.jsonl"))


class TestStderr:
    """Whatever becomes of it, the work goes on and the exit code is that of the work."""

    BROKEN = ("2>/dev/full", "2>&-", "2> >(true)")

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_refusal_is_still_2(self, broken: str) -> None:
        assert shell(f"{{}} {broken}", *ASK, "--out", "nowhere").returncode == 2

    def test_a_reader_that_has_gone_does_not_make_a_refusal_a_success(self) -> None:
        seen = shell("{} 2>&1 >/dev/null | true; echo ${{PIPESTATUS[0]}}", *ASK, "--out", "nowhere")
        assert seen.stdout == "2\n"

    @pytest.mark.parametrize("broken", BROKEN)
    def test_the_answer_is_given(self, broken: str) -> None:
        seen = shell(f"{{}} {broken}", *ASK, "--json", "--verbose")
        assert seen.returncode == 0
        assert json.loads(seen.stdout)["options"] == ["billing", "sales"]

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_batch_is_finished(self, broken: str, batch: tuple[str, ...]) -> None:
        assert shell(f"{{}} {broken}", *batch, "--verbose").returncode == 0
        assert len(Path(batch[-1]).read_text().splitlines()) == 4


class TestStdout:
    @pytest.mark.parametrize("argv", [ASK, (*ASK, "--json"), LIST, LIST[:-1], ("--help",), ("decide", "--help")])
    @pytest.mark.parametrize(
        ("broken", "reason"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
    )
    def test_an_answer_that_is_lost_is_1_and_one_line(self, broken: str, reason: str, argv: tuple[str, ...]) -> None:
        seen = shell(f"{{}} {broken}", *argv)
        assert seen.stderr == f"bmoe: cannot write to stdout: {reason}\n"
        assert seen.returncode == 1

    @pytest.mark.parametrize("argv", [ASK, (*ASK, "--json"), LIST, ("--help",)])
    def test_a_reader_that_has_gone_is_no_error(self, argv: tuple[str, ...]) -> None:
        seen = shell("{{ sleep 0.2; {}; }} | true; echo ${{PIPESTATUS[0]}}", *argv)
        assert (seen.stdout, seen.stderr) == ("0\n", "")

    def test_a_reader_that_has_gone_does_not_make_a_refusal_a_success(self) -> None:
        seen = shell("{{ sleep 0.2; {}; }} | true; echo ${{PIPESTATUS[0]}}", *ASK, "--out", "nowhere", "--json")
        assert seen.stdout == "2\n"

    def test_an_error_that_cannot_be_given_as_json_is_on_stderr_all_the_same(self) -> None:
        seen = shell("{} >/dev/full", *ASK, "--out", "nowhere", "--json")
        assert seen.returncode == 1
        refusal, stdout = seen.stderr.splitlines()
        assert "do nothing without --batch" in refusal
        assert stdout == "bmoe: cannot write to stdout: No space left on device"

    def test_a_batch_that_has_nothing_to_say_needs_none(self, batch: tuple[str, ...]) -> None:
        assert shell("{} >&-", *batch).returncode == 0
