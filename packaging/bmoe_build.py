"""The build backend: scikit-build-core, once llama.cpp is in the cache.

Having it before CMake starts makes what can go wrong with it (no compiler, no network, a full disk) one sentence.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from scikit_build_core import build as scikit
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "csrc" / "cmake"))
import llama

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    prepare(config_settings)
    return scikit.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    prepare(config_settings)
    return scikit.build_editable(wheel_directory, config_settings, metadata_directory)


def prepare(config_settings: Settings) -> None:
    defines = dict(asked_for(config_settings or {}, os.environ))
    arguments = [f"--define={name}={value}" for name, value in defines.items() if name.startswith("GGML_")]
    if defines.get("BMOE_LLAMA_DIR"):
        arguments.append(f"--source={defines['BMOE_LLAMA_DIR']}")
    code = llama.main(arguments)
    if code:
        raise SystemExit(code)


def asked_for(
    config_settings: Mapping[str, list[str] | str], environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """CMake definitions from where scikit-build-core takes them, weakest first."""
    for define in environment.get("SKBUILD_CMAKE_DEFINE", "").split(";"):
        if define:
            yield split_define(define)
    arguments = as_list(config_settings.get("cmake.args", []))
    for argument in [*shlex.split(environment.get("CMAKE_ARGS", "")), *arguments]:
        if argument.startswith("-D"):
            yield split_define(argument[2:])
    for name, value in config_settings.items():
        if name.startswith("cmake.define."):
            yield name.removeprefix("cmake.define."), as_list(value)[-1]


def as_list(value: list[str] | str) -> list[str]:
    return value.split(";") if isinstance(value, str) else value


def split_define(define: str) -> tuple[str, str]:
    name, _, value = define.partition("=")
    return name.partition(":")[0], value
