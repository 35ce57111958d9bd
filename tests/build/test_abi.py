"""csrc/abi.txt is what programs compiled against bmoe.h rely on, and a change of it is seen."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bmoe_native._lib import library_path
from tests.build.conftest import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import abi  # type: ignore[import-not-found, unused-ignore]

HEADER = ROOT / "csrc" / "include" / "bmoe.h"
DESCRIPTION = ROOT / "csrc" / "abi.txt"
HELP = "the ABI is not what csrc/abi.txt says: move BMOE_ABI_VERSION in bmoe.h, then `make abi`"


def test_the_description_is_true() -> None:
    """Of the header here, and of the library that is loaded."""
    assert abi.describe(HEADER, library_path()) == DESCRIPTION.read_text(encoding="utf-8"), HELP


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return change


def swapped(first: str, second: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        before, after = (re.escape(line) for line in (first, second))
        changed, n = re.subn(rf"( *{before}[^\n]*\n)( *{after}[^\n]*\n)", r"\2\1", text)
        assert n == 1, first
        return changed

    return change


CHANGES = {
    "a field is moved": swapped("int64_t n_hits;", "int64_t n_misses;"),
    "a field is added": replaced("    float softcap;\n", "    float softcap;\n    float other;\n"),
    "a field is wider": replaced("    uint32_t seed;", "    uint64_t seed;"),
    "a field is of another type": replaced("    uint32_t seed;", "    float seed;"),
    "a value is moved": replaced("BMOE_E_MEMORY = -8,", "BMOE_E_MEMORY = -108,"),
    "a value is removed": replaced("    BMOE_TOKEN_UNUSED = 16,\n", ""),
    "a parameter is wider": replaced("bmoe_engine *engine, int32_t token);", "bmoe_engine *engine, int64_t token);"),
    "a function is removed": replaced("BMOE_API int32_t bmoe_state_drop(bmoe_engine *engine);\n", ""),
    "a hook takes less": replaced("int32_t (*bmoe_poll_fn)(void *user);", "int32_t (*bmoe_poll_fn)(void);"),
    "the version moves": replaced("BMOE_ABI_VERSION = ", "BMOE_ABI_VERSION = 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_header_is_seen(tmp_path: Path, what: str) -> None:
    changed = tmp_path / "bmoe.h"
    changed.write_text(CHANGES[what](HEADER.read_text(encoding="utf-8")), encoding="utf-8")
    assert abi.describe(changed, library_path()) != DESCRIPTION.read_text(encoding="utf-8")


def stub(folder: Path, names: list[str], soname: str, version: str) -> Path:
    """A library that exports these names and does nothing."""
    source, exports, library = folder / "stub.c", folder / "exports.map", folder / soname
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    exports.write_text(f"{version} {{ global: bmoe_*; local: *; }};\n")
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", f"-Wl,--version-script={exports}"]
    subprocess.run(["cc", *flags, source, "-o", library], check=True)
    return library


def test_a_changed_library_is_seen(tmp_path: Path) -> None:
    names = abi.function_names(HEADER)
    soname = library_path().name
    version = f"BMOE_{soname.rpartition('.')[2]}"
    said = DESCRIPTION.read_text(encoding="utf-8")
    assert abi.describe(HEADER, stub(tmp_path, names, soname, version)) == said
    assert abi.describe(HEADER, stub(tmp_path, names[:-1], soname, version)) != said
    assert abi.describe(HEADER, stub(tmp_path, [*names, "bmoe_more"], soname, version)) != said
    assert abi.describe(HEADER, stub(tmp_path, names, soname, "BMOE_3")) != said
    assert abi.describe(HEADER, stub(tmp_path, names, "libbmoe.so.3", version)) != said
