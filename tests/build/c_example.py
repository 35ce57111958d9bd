"""examples/c/decide.c, compiled and run with the very lines that it gives."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.build.conftest import ROOT

SOURCE = ROOT / "examples" / "c" / "decide.c"


def compile_lines() -> str:
    """The shell commands of its first comment, up to the call."""
    comment = SOURCE.read_text(encoding="utf-8").partition("*/")[0]
    lines = re.findall(r"^ \*   (\S.*)$", comment, re.MULTILINE)
    return "\n".join(line for line in lines if not line.startswith("./"))


def assert_c_example_decides(python_bin: Path, folder: Path, model: Path) -> None:
    """With the bmoe that the `python` of python_bin has, and no help from the environment."""
    for source in (SOURCE, SOURCE.with_name("decision.h")):
        shutil.copy(source, folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PYTHON", "C_INCLUDE"))}
    env = {**kept, "PATH": f"{python_bin}{os.pathsep}{os.environ['PATH']}"}
    script = f"{compile_lines()}\n./decide '{model}' 'Which is a fruit?' A B C\n"
    done = subprocess.run(["sh", "-e", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), f"{script}{done.stderr}"
    assert re.fullmatch(r"(-\d+\.\d+ [ABC]\n){3}", done.stdout)
