"""The wheel that `pip install .` makes, in an environment that knows nothing else of this checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.build.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.iterdir()
    return path


def test_it_holds_the_library_the_header_and_the_packages(wheel: Path) -> None:
    assert wheel.name.startswith("bmoe-")
    assert "-py3-none-linux_" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {
        "bmoe/__init__.py",
        "bmoe/py.typed",
        "bmoe/cli/app.py",
        "bmoe_native/__init__.py",
        "bmoe_native/py.typed",
        "bmoe_native/_bmoe_cffi.py",
        "bmoe_native/libbmoe.so",
        "bmoe_native/include/bmoe.h",
        "bmoe_native/licenses/LICENSE.llama.cpp",
    }
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"bmoe", "bmoe_native"}
    assert not [name for name in names if name.endswith((".toml", ".a", ".o"))]


def test_it_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        result = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    where = run(python, "-c", "import bmoe_native; print(bmoe_native.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    assert "llama.cpp" in run(python, "-c", "import bmoe_native; print(bmoe_native.build_info())")
    assert "decide" in run(tmp_path / "venv" / "bin" / "bmoe", "--help")
