"""libbmoe.so as it was installed: what it shows to a process, and what it needs of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe_native._lib import library_path
from tests import tiny
from tests.build.c_example import assert_c_example_decides
from tests.build.conftest import ROOT


@pytest.fixture(scope="module")
def library() -> Path:
    return library_path()


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_it_exports_what_the_header_declares_and_nothing_else(library: Path) -> None:
    """All in one version, that of the ABI; nm shows the version itself too."""
    version = f"BMOE_{library.name.rpartition('.')[2]}"
    shown = {line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()} - {version}
    exported = {name.removesuffix(f"@@{version}") for name in shown}
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


def test_its_name_for_the_loader_holds_the_abi(library: Path) -> None:
    assert re.findall(r"\(SONAME\).*\[(.*)\]", output("readelf", "-dW", library)) == [library.name]


def test_it_names_no_folder_of_who_built_it(library: Path) -> None:
    text = library.read_bytes()
    for folder in (ROOT, Path.home() / ".cache", *filter(None, [os.environ.get("BMOE_CACHE")])):
        assert str(folder).encode() not in text


def test_the_c_example_compiles_by_the_lines_it_gives(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny.gguf")
    assert_c_example_decides(Path(sys.executable).parent, tmp_path, model)
