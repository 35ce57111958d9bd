"""The wheel that `pip install .` makes, in an environment that knows nothing else of this checkout."""

import json
import math
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from bmoe_native._lib import library_path
from tests import tiny
from tests.build.c_example import assert_c_example_decides
from tests.build.conftest import ROOT
from tests.build.hosts import build_cpp_host

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
        f"bmoe_native/{library_path().name}",
        "bmoe_native/cmake/bmoeConfig.cmake",
        "bmoe_native/pkgconfig/bmoe.pc",
        "bmoe_native/include/bmoe.h",
        "bmoe_native/licenses/LICENSE.llama.cpp",
    }
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"bmoe", "bmoe_native"}
    assert not [name for name in names if name.endswith((".toml", ".a", ".o"))]
    assert b"Remote RPC server" not in zipfile.ZipFile(wheel).read("bmoe_native/libbmoe.so")  # a device for tests


@dataclass(frozen=True)
class CleanEnvironment:
    """A venv with nothing but the wheel and what it needs, and a folder to work in."""

    folder: Path

    def run(self, *command: str | Path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BMOE_"))}
        result = subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    made = CleanEnvironment(tmp_path_factory.mktemp("clean"))
    made.run(sys.executable, "-m", "venv", made.folder / "venv")
    made.run(made.bin / "python", "-m", "pip", "install", "--quiet", wheel)
    return made


def test_it_is_found_in_a_clean_environment(clean: CleanEnvironment) -> None:
    where = clean.run(clean.bin / "python", "-c", "import bmoe_native; print(bmoe_native.__file__)")
    assert where.startswith(str(clean.folder / "venv"))
    assert "llama.cpp" in clean.run(clean.bin / "python", "-c", "import bmoe_native; print(bmoe_native.build_info())")
    assert "decide" in clean.run(clean.bin / "bmoe", "--help")


def test_it_decides_in_a_clean_environment(clean: CleanEnvironment, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    options = ["--option", "an apple", "--option", "a table", "--option", "a song"]
    said = clean.run(clean.bin / "bmoe", "decide", "-m", model, "Which is a fruit?", *options, "--json")
    record = json.loads(said)
    assert record["model"] == "tiny.gguf"
    assert record["options"] == ["an apple", "a table", "a song"] and record["choices"] == ["A", "B", "C"]
    assert record["best"] == max(range(3), key=record["choice_logp"].__getitem__)
    assert len(record["choice_logp"]) == 3 and all(logp < 0 for logp in record["choice_logp"])
    assert math.fsum(map(math.exp, record["choice_logp"])) + record["outside_mass"] == pytest.approx(1)
    assert record["n_tokens"] == record["n_reused"] + record["n_prefilled"] > 0


@pytest.mark.parametrize("how", ["CMake", "pkg-config"])
def test_hosts_find_it(clean: CleanEnvironment, tmp_path: Path, how: str) -> None:
    package = next((clean.folder / "venv").rglob("bmoe_native"))
    model = tiny.write(tmp_path / "tiny.gguf")
    said = clean.run(build_cpp_host(how, package, tmp_path), model, "Which?", "A", "B")
    assert re.fullmatch(r"(-\d+\.\d+ [AB]\n){2}", said)


def test_the_c_example_compiles_against_it(clean: CleanEnvironment, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    assert_c_example_decides(clean.bin, tmp_path, model)
