"""llama.py run as a program, over a llama.cpp tree that takes a second to build."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "csrc" / "cmake" / "llama.py"

TREE = {
    "include/llama.h": "int llama_answer(void);\n",
    "src/llama.c": '#include "llama.h"\nint llama_answer(void) { return 42; }\n',
    "CMakeLists.txt": """
if(DEFINED ENV{SOURCE_DATE_EPOCH})
  message(FATAL_ERROR "SOURCE_DATE_EPOCH came through")
endif()
if(DEFINED ENV{FAKE_SLEEP_S})
  execute_process(COMMAND sh -c "echo $$ > $ENV{FAKE_PID_FILE}; exec sleep $ENV{FAKE_SLEEP_S}")
endif()
add_library(llama STATIC src/llama.c)
target_include_directories(llama PUBLIC include)
""",
}


def load_llama() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bmoe_llama", LLAMA)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tree(root: Path) -> Path:
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@dataclass
class Llama:
    """How llama.py is called in one test."""

    cache: Path
    tree: Path
    env: dict[str, str] = field(default_factory=lambda: {**os.environ, "PIP_CONFIG_FILE": os.devnull})

    def command(self, *arguments: str, source: bool = True) -> list[str]:
        tree = ["--source", str(self.tree)] if source else []
        return [sys.executable, str(LLAMA), "--cache", str(self.cache), *tree, *arguments]

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        environment = {**self.env, **(env or {})}
        return subprocess.Popen(self.command(*arguments), stdout=pipe, stderr=pipe, text=True, env=environment)

    def run(self, *arguments: str, source: bool = True) -> "subprocess.CompletedProcess[str]":
        command = self.command(*arguments, source=source)
        return subprocess.run(command, capture_output=True, text=True, env=self.env, timeout=120)

    def build(self, *arguments: str) -> Path:
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        return Path(result.stdout.rstrip("\n"))

    def refuse(self, *arguments: str, source: bool = True) -> str:
        """The one sentence it ends with when there is no llama.cpp to be had."""
        result = self.run(*arguments, source=source)
        assert result.returncode == 1, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        said = [line for line in result.stderr.splitlines() if line.startswith("bmoe build: ")]
        assert said == result.stderr.splitlines()[-1:], result.stderr
        return said[0].removeprefix("bmoe build: ")

    def complete(self) -> list[Path]:
        return sorted(self.cache.rglob("llama.cmake"))

    def unfinished(self) -> list[Path]:
        return sorted(self.cache.rglob("tmp-*"))


@pytest.fixture
def llama(tmp_path: Path) -> Llama:
    return Llama(cache=tmp_path / "cache", tree=write_tree(tmp_path / "tree"))
