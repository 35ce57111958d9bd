"""The checkout's own .venv: made, or made again when broken, with bmoe installed into it for development.

devenv.py run      what bmoe needs to run
devenv.py dev      and what its tests need
devenv.py healthy  prints yes if the .venv that is there can be used
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"

sys.path.insert(0, str(ROOT / "csrc" / "cmake"))
import llama

EXTRAS = {"run": "", "dev": "[dev]"}
# Tests compute on a device that is a server on this machine, which what is given away does not take for one.
OPTIONS = {"run": "OFF", "dev": "ON"}


def healthy(place: Path = VENV) -> bool:
    """Its interpreter still starts, and it was made for this path: scripts and the installed bmoe hold it."""
    activate = place / "bin" / "activate"
    if not activate.is_file() or str(place) not in activate.read_text():
        return False
    try:
        return subprocess.run([place / "bin" / "python", "-c", "import pip"], capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv(place: Path = VENV) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise llama.BuildError(f"{sys.executable} cannot make a venv: install Debian's python3-venv, or set PYTHON")
    print(f"creating {place.relative_to(ROOT)}", file=sys.stderr, flush=True)
    venv.create(place, clear=True, with_pip=True, symlinks=True)


def pip_install(what: str, *arguments: str, place: Path = VENV) -> None:
    print(f"installing {what}", file=sys.stderr, flush=True)
    run_tool(f"pip could not install {what}", pip(place, "install", *arguments))


def pip(place: Path, *arguments: str) -> list[str]:
    return [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]


def run_tool(failure: str, command: list[str]) -> str:
    """What it printed; where it fails that is shown.

    Raises: BuildError, which begins with the failure.
    """
    out = subprocess.PIPE
    result = subprocess.run(command, cwd=ROOT, text=True, errors="replace", stdout=out, stderr=subprocess.STDOUT)
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        raise llama.BuildError(f"{failure}; what it said is above")
    return result.stdout


def build_requirements() -> list[str]:
    found = re.search(r"^requires = (\[.*\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return list(ast.literal_eval(found[1])) if found else []


def prepare_tools(place: Path, *more: str, native: str = "ON") -> None:
    """A venv with what builds bmoe, first in PATH, and llama.cpp in the cache."""
    compiler = llama.find_compiler("CXX", llama.CXX_NAMES, "C++")
    llama.check_compiler(compiler)
    if not healthy(place):
        make_venv(place)
    os.environ["PATH"] = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    pip_install("build tools", "pip>=22", *build_requirements(), *missing, *more, place=place)
    # Here and not only inside pip, which would hide three minutes of progress.
    command = [str(place / "bin" / "python"), str(ROOT / "csrc" / "cmake" / "llama.py"), "--native", native]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(1)


def prepare(extras: str) -> None:
    prepare_tools(VENV)
    # In an environment made anew each time, nothing compiled would be used again.
    option = f"--config-settings=cmake.define.BMOE_TEST_RPC={OPTIONS[extras]}"
    pip_install("bmoe and what it needs", "--no-build-isolation", option, "--editable", f".{EXTRAS[extras]}")


def reported(work: Callable[[], None]) -> int:
    """The exit code of a build; what went wrong is said on stderr."""
    try:
        work()
    except (llama.BuildError, OSError, subprocess.SubprocessError) as error:
        print(f"bmoe build: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["healthy"]:
        print("yes" if healthy() else "no")
        return 0
    return reported(lambda: prepare(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
