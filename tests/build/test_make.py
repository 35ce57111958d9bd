"""The two commands of the README on machines that lack something, and the build backend behind pip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.conftest import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "checkout"
    for name in ("packaging", "csrc"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    return copy


def make(checkout: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {**{name: value for name, value in os.environ.items() if name not in ("CXX", "MAKEFLAGS")}, **environment}
    return subprocess.run(["make", *arguments], cwd=checkout, env=env, capture_output=True, text=True)


def sentences(text: str) -> list[str]:
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("bmoe build: ")]


def test_help_is_the_default_and_names_the_targets(checkout: Path) -> None:
    result = make(checkout)
    assert result.returncode == 0, result.stderr
    assert {line.split()[1] for line in result.stdout.splitlines()} >= {"demo", "test", "check", "wheel", "clean"}


@pytest.mark.parametrize("target", ["demo", "test", "wheel"])
def test_a_python_too_old(checkout: Path, target: str) -> None:
    result = make(checkout, target, "PYTHON=/bin/false")
    assert result.returncode != 0
    assert sentences(result.stderr) == [
        "bmoe build: python 3.10 or newer is needed, and /bin/false is not; name one with PYTHON=..."
    ]


@pytest.mark.parametrize("target", ["demo", "wheel"])
def test_no_compiler(checkout: Path, target: str) -> None:
    result = make(checkout, target, f"PYTHON={sys.executable}", CXX="/nowhere/c++")
    assert result.returncode != 0
    assert sentences(result.stderr) == ["bmoe build: no C++ compiler: CXX is set to '/nowhere/c++', which is not there"]
    assert not (checkout / ".venv").exists() and not (checkout / "build").exists()


def test_a_python_without_venv(checkout: Path, tmp_path: Path) -> None:
    program = (
        "import runpy, sys, importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'ensurepip' else find(name, *rest); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(checkout / "packaging" / "devenv.py"), "run"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    (said,) = sentences(result.stderr)
    assert "python3-venv" in said


def devenv(checkout: Path, what: str) -> str:
    command = [sys.executable, str(checkout / "packaging" / "devenv.py"), what]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_venv_that_broke_or_was_moved_is_noticed(checkout: Path) -> None:
    assert devenv(checkout, "healthy") == "no"
    subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
    assert devenv(checkout, "healthy") == "yes"
    moved = checkout.rename(checkout.with_name("moved"))
    assert devenv(moved, "healthy") == "no"
    moved.rename(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    assert devenv(checkout, "healthy") == "no"


def backend(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT / "packaging"), **environment}
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_backend_fails_with_one_sentence(kind: str, tmp_path: Path) -> None:
    program = f"import bmoe_build; bmoe_build.build_{kind}({str(tmp_path)!r})"
    result = backend(program, CXX="/nowhere/c++")
    assert result.returncode == 1
    assert "no C++ compiler" in sentences(result.stderr)[0]
    assert "CMake" not in result.stderr + result.stdout


def test_the_backend_asks_for_what_cmake_will_ask_for() -> None:
    program = (
        "import bmoe_build; print(dict(bmoe_build.asked_for("
        "{'cmake.define.GGML_NATIVE': 'OFF', 'cmake.args': '-DGGML_RPC:BOOL=ON;-G;Ninja', 'build.verbose': 'true'},"
        " {'CMAKE_ARGS': '-DGGML_NATIVE=ON -DBMOE_LLAMA_DIR=\"/a b\"', 'SKBUILD_CMAKE_DEFINE': 'GGML_LTO=ON;X=1'})))"
    )
    result = backend(program)
    assert (
        result.stdout
        == str({"GGML_LTO": "ON", "X": "1", "GGML_NATIVE": "OFF", "BMOE_LLAMA_DIR": "/a b", "GGML_RPC": "ON"}) + "\n"
    ), result.stderr
