"""libbmoe.so as it was installed: what it shows to a process, and what it needs of one."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.build.c_example import assert_c_example_decides
from tests.build.conftest import ROOT


@pytest.fixture(scope="module")
def library() -> Path:
    declarations = importlib.import_module("bmoe_native._bmoe_cffi")
    return Path(str(declarations.__file__)).with_name("libbmoe.so")


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_it_exports_what_the_header_declares_and_nothing_else(library: Path) -> None:
    exported = {line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    header = (ROOT / "csrc" / "include" / "bmoe.h").read_text()
    declared = set(re.findall(r"^BMOE_API [^;(]*?(bmoe_\w+)\(", header, re.MULTILINE))
    assert exported == declared
    assert "bmoe_open" in declared


def test_it_needs_nothing_but_the_c_library(library: Path) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", library)))
    assert {re.sub(r"\.so.*", "", name) for name in needed} <= {
        "libc",
        "libm",
        "libdl",
        "libpthread",
        "ld-linux-aarch64",
        "ld-linux-x86-64",
    }


def test_it_names_no_folder_of_who_built_it(library: Path) -> None:
    text = library.read_bytes()
    for folder in (ROOT, Path.home() / ".cache", *filter(None, [os.environ.get("BMOE_CACHE")])):
        assert str(folder).encode() not in text


def test_the_c_example_compiles_by_the_lines_it_gives(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    assert_c_example_decides(Path(sys.executable).parent, tmp_path, model)


@pytest.mark.slow
def test_cmake_installs_it_for_hosts_that_are_not_python(tmp_path: Path) -> None:
    """The library, its header and the licences of what it contains; then a C program compiled against just these."""
    build, prefix = tmp_path / "build", tmp_path / "prefix"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    output("cmake", "-S", ROOT / "csrc", "-B", build, *generator, "-DCMAKE_INSTALL_LIBDIR=lib")
    output("cmake", "--build", build, "--parallel", "2")
    output("cmake", "--install", build, "--prefix", prefix)
    assert (prefix / "share" / "doc" / "bmoe" / "LICENSE.llama.cpp").is_file()
    (tmp_path / "host.c").write_text(
        "#include <bmoe.h>\nint main(void) { return bmoe_abi_version() == BMOE_ABI_VERSION ? 0 : 1; }\n"
    )
    flags = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{prefix / 'include'}", f"-L{prefix / 'lib'}"]
    output("cc", *flags, tmp_path / "host.c", "-o", tmp_path / "host", "-lbmoe", f"-Wl,-rpath,{prefix / 'lib'}")
    output(tmp_path / "host")
