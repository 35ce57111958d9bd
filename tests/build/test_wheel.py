"""The wheel that `make wheel` makes: on other CPUs, and where nothing of this checkout is known."""

import json
import math
import os
import platform
import re
import shutil
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

MACHINE = platform.machine()
# What docs/wheels.md promises to need no more than.
LEVELS = {
    "x86_64": "SSE3 SSSE3 SSE4.1 SSE4.2 POPCNT BMI2 AVX F16C FMA AVX2",
    "aarch64": "crc32 lse rdm dotprod",
}
LACKS = "this CPU lacks what this build of bmoe needs: "
QEMU = shutil.which("qemu-x86_64")
on_other_cpus = pytest.mark.skipif(QEMU is None or MACHINE != "x86_64", reason="needs qemu-user on x86-64")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "packaging" / "portable.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.iterdir()
    assert result.stdout == f"{path}\n"
    return path


def test_it_holds_the_library_the_header_and_the_packages(wheel: Path) -> None:
    assert re.fullmatch(rf"bmoe-[0-9.]+-py3-none-(manylinux_2_\d+_{MACHINE}\.?)+\.whl", wheel.name)
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
    """A venv with nothing but the wheel and what it needs, a PATH that holds nothing else, and a folder to work in."""

    folder: Path

    def ask(self, *command: str | Path) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BMOE_"))}
        env = {**clean, "PATH": str(self.bin)}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)

    def run(self, *command: str | Path) -> str:
        result = self.ask(*command)
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
    builders = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "cmake", "ninja", "make")
    assert [name for name in builders if shutil.which(name, path=str(made.bin))] == []
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


def test_it_is_compiled_for_the_level_that_is_promised(clean: CleanEnvironment) -> None:
    library = clean.run(clean.bin / "bmoe", "--version").splitlines()[1]
    assert library.partition(", for ")[2] == LEVELS[MACHINE], library


def on_cpu(clean: CleanEnvironment, cpu: str, *command: str | Path) -> "subprocess.CompletedProcess[str]":
    return clean.ask(str(QEMU), "-cpu", cpu, clean.bin / "python", *command)


@on_other_cpus
@pytest.mark.parametrize("command", [["decide", "-m", "{model}", "Which?", "--option", "a", "--option", "b"], ["devices"]])
def test_a_cpu_below_the_level_is_told_what_it_lacks(
    clean: CleanEnvironment, tmp_path: Path, command: list[str]
) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    words = [word.format(model=model) for word in command]
    said = on_cpu(clean, "Nehalem", clean.bin / "bmoe", *words)
    assert (said.returncode, said.stdout) == (1, ""), said.stderr
    assert f"{LACKS}BMI2, AVX, F16C, FMA, AVX2;" in said.stderr


@on_other_cpus
def test_the_lowest_cpu_of_the_level_gives_the_same_numbers(clean: CleanEnvironment, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    command = [clean.bin / "bmoe", "decide", "-m", model, "Which?", "--option", "a", "--option", "b", "--json"]
    said = on_cpu(clean, "Haswell", *command)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["choice_logp"] == json.loads(clean.run(*command))["choice_logp"]


@on_other_cpus
def test_a_native_build_too_tells_an_older_cpu(tmp_path: Path) -> None:
    program = "import sys; from bmoe_native import Engine; Engine.open(sys.argv[1])"
    model = tiny.write(tmp_path / "tiny.gguf")
    command = [str(QEMU), "-cpu", "Nehalem", sys.executable, "-c", program, str(model)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1 and f"UnsupportedError: {LACKS}" in said.stderr, said.stderr


@pytest.mark.parametrize("how", ["CMake", "pkg-config"])
def test_hosts_find_it(clean: CleanEnvironment, tmp_path: Path, how: str) -> None:
    package = next((clean.folder / "venv").rglob("bmoe_native"))
    model = tiny.write(tmp_path / "tiny.gguf")
    said = clean.run(build_cpp_host(how, package, tmp_path), model, "Which?", "A", "B")
    assert re.fullmatch(r"(-\d+\.\d+ [AB]\n){2}", said)


def test_the_c_example_compiles_against_it(clean: CleanEnvironment, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    assert_c_example_decides(clean.bin, tmp_path, model)
