"""An interrupt while Python is still importing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.cli import entry


@pytest.mark.parametrize(
    "begin", [("-m", "bmoe.cli"), ("-c", "import sys; from bmoe.cli.entry import main; sys.exit(main())")]
)
def test_an_interrupt_while_importing_is_130_and_silent(tmp_path: Path, begin: tuple[str, str]) -> None:
    stand_in = tmp_path / "typer.py"
    stand_in.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    seen = subprocess.run(
        [sys.executable, *begin, "--help"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert (seen.returncode, seen.stdout, seen.stderr) == (130, b"", b"")


def test_the_command_begins_there() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'bmoe = "{entry.__name__}:main"' in project
