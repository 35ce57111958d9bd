"""What GGML_NATIVE=OFF is compiled for, beside what the pinned llama.cpp could be compiled for."""

import json
import platform
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.build.conftest import ROOT, Llama, load_llama

HEADER = ROOT / "csrc" / "cmake" / "llama" / "cpu_features.h"
EVERY_X86_64 = {"__SSE__", "__SSE2__"}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load_llama()


@pytest.fixture(scope="module")
def ggml_cpu(module: ModuleType) -> Path:
    """The pinned sources, which the library was built from."""
    home = module.default_cache() / "llama.cpp" / f"{module.PIN_VERSION}-{module.PIN_SHA256[:8]}"
    return Path(home / "src" / "ggml" / "src" / "ggml-cpu")


def flags_of(targets: Path) -> dict[str, str]:
    flags: dict[str, str] = json.loads(targets.with_name("inputs.json").read_text())["flags"]
    return flags


def test_off_asks_for_the_level_and_more_where_more_is_asked_for(llama: Llama, module: ModuleType) -> None:
    level = module.LEVELS[platform.machine()]
    assert flags_of(llama.build("--native", "OFF")).items() >= level.items()
    assert not flags_of(llama.build()).keys() & level.keys()
    more = flags_of(llama.build("--native", "OFF", "--define", "GGML_AVX512=ON"))
    assert more.items() >= {**level, "GGML_AVX512": "ON"}.items()


def test_the_level_decides_each_instruction_set_that_ggml_can_use(module: ModuleType, ggml_cpu: Path) -> None:
    of_x86 = (ggml_cpu / "CMakeLists.txt").read_text().partition('STREQUAL "x86"')[2].partition('STREQUAL "PowerPC"')[0]
    options = set(re.findall(r"if \((GGML_\w+)\)\s+list\(APPEND ARCH_FLAGS -m(?!arch=)", of_x86))
    assert len(options) >= 12
    assert options == set(module.LEVELS["x86_64"])


def test_each_instruction_set_that_ggml_is_written_for_can_be_asked_of_the_cpu(ggml_cpu: Path) -> None:
    names = r"__(?:SSE|SSSE|AVX|AMX|FMA|F16C|BMI|XOP|GFNI|POPCNT|LZCNT)[A-Z0-9_]*__"
    sources = [path for path in ggml_cpu.rglob("*") if path.suffix in (".c", ".cpp", ".h")]
    used = {name for path in sources for name in re.findall(names, path.read_text())} - EVERY_X86_64
    assert len(used) >= 15
    assert used <= set(re.findall(r"X\((__\w+__),", HEADER.read_text()))
