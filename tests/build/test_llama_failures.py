"""What can go wrong on the way to a built llama.cpp: each ends in one sentence that says what to do."""

import hashlib
import io
import os
import shutil
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.build.conftest import Llama


def write_sdist(folder: Path, version: str = "0.3.36") -> Path:
    """A package that leaves a file beside itself if anything of it is run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llama_cpp_python-{version}.tar.gz"
    setup = f"open({str(folder / 'was-run')!r}, 'w').close()\nimport setuptools\nsetuptools.setup()\n"
    pkg_info = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"setup.py": setup, "PKG-INFO": pkg_info}.items():
            member = tarfile.TarInfo(f"llama_cpp_python-{version}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def put_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def forget_pip_sources(llama: Llama) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        llama.env.pop(name, None)


def test_wrong_hash_from_the_index(llama: Llama, tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / "index")
    forget_pip_sources(llama)
    llama.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(sdist.parent)}
    said = llama.refuse(source=False)
    assert "wrong hash" in said
    assert "expected sha256 832db0699007f1be" in said
    assert f"found {hashlib.sha256(sdist.read_bytes()).hexdigest()}" in said
    assert not (sdist.parent / "was-run").exists()
    assert not llama.unfinished()


def test_wrong_hash_of_a_given_archive(llama: Llama, tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path)
    said = llama.refuse("--sdist", str(sdist), source=False)
    assert "wrong hash" in said
    assert hashlib.sha256(sdist.read_bytes()).hexdigest() in said


def test_no_network(llama: Llama) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        forget_pip_sources(llama)
        llama.env |= {"PIP_INDEX_URL": f"http://127.0.0.1:{closed.getsockname()[1]}/simple", "PIP_RETRIES": "0"}
        said = llama.refuse(source=False)
    assert "llama-cpp-python 0.3.36" in said
    assert "network" in said
    assert "mirror" in said
    log = Path(said.rpartition(" ")[2])
    assert "llama-cpp-python" in log.read_text()


def test_no_pip(llama: Llama, tmp_path: Path) -> None:
    (tmp_path / "shadow" / "pip").mkdir(parents=True)
    (tmp_path / "shadow" / "pip" / "__init__.py").write_text("raise ModuleNotFoundError('No module named pip')\n")
    llama.env["PYTHONPATH"] = str(tmp_path / "shadow")
    assert "has no pip" in llama.refuse(source=False)


def test_no_compiler(llama: Llama, tmp_path: Path) -> None:
    for name in ("CC", "CXX"):
        llama.env.pop(name, None)
    llama.env["PATH"] = str(tmp_path)
    said = llama.refuse()
    assert "no C++ compiler" in said
    assert "install" in said


def test_a_compiler_that_is_not_there(llama: Llama) -> None:
    llama.env["CXX"] = "/nowhere/c++"
    said = llama.refuse()
    assert "no C++ compiler" in said
    assert "/nowhere/c++" in said


def test_a_compiler_too_old(llama: Llama, tmp_path: Path) -> None:
    old = put_program(tmp_path, "old-c++", "echo \"c++: error: unrecognized option '-std=c++17'\" >&2; exit 1")
    llama.env["CXX"] = str(old)
    said = llama.refuse()
    assert "does not compile C++17" in said
    assert "unrecognized option" in said


def test_no_cmake(llama: Llama, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for variable, name in (("CC", "cc"), ("CXX", "c++")):
        found = shutil.which(name)
        assert found is not None
        llama.env[variable] = found
    llama.env["PATH"] = str(tools)
    said = llama.refuse()
    assert "cmake not found" in said
    assert "pip install cmake" in said


def test_source_that_does_not_compile(llama: Llama) -> None:
    (llama.tree / "src" / "llama.c").write_text("int broken( {\n")
    result = llama.run()
    assert "error:" in result.stderr.splitlines()[-2]
    log = Path(llama.refuse().rpartition(" ")[2])
    assert "int broken(" in log.read_text()
    assert not llama.complete()
    assert not llama.unfinished()


def test_a_tree_that_is_no_llama_cpp(llama: Llama) -> None:
    (llama.tree / "include" / "llama.h").unlink()
    assert "include/llama.h is missing" in llama.refuse()


def test_disk_full_while_building(llama: Llama, tmp_path: Path) -> None:
    put_program(tmp_path / "tools", "cmake", "echo 'write error: No space left on device' >&2; exit 1")
    llama.env["PATH"] = f"{tmp_path / 'tools'}{os.pathsep}{llama.env['PATH']}"
    assert "disk full while building" in llama.refuse()


def test_a_cache_that_cannot_be_written(llama: Llama) -> None:
    llama.cache.write_text("a file where the folder would be")
    said = llama.refuse()
    assert str(llama.cache) in said
    assert "BMOE_CACHE" in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes a privilege that this process has not")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.optional("a container need not let its root mount anything")
@pytest.mark.parametrize(("what", "source"), [("fetching", False), ("building", True)])
def test_disk_too_small(llama: Llama, small_disk: Path, what: str, source: bool) -> None:
    llama.cache = small_disk / "cache"
    said = llama.refuse(source=source)
    assert said.startswith(f"disk full: {what} llama.cpp needs ")
    assert str(small_disk) in said
    assert "8 MB are free" in said
