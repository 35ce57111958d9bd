"""Hosts outside the checkout, built with nothing of bmoe but an installed prefix."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.build.conftest import ROOT

EXAMPLES = ROOT / "examples"
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror")


def clean_environment() -> dict[str, str]:
    unwanted = ("LD_", "PYTHON", "C_INCLUDE", "CPLUS_", "CPATH", "LIBRARY_PATH", "CMAKE_", "PKG_CONFIG", "BMOE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def run(*command: object, **environment: str) -> str:
    words = [str(word) for word in command]
    env = {**clean_environment(), **environment}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def configured_by_cmake(language: str, prefix: Path, folder: Path, *flags: str) -> Path:
    """The folder of the programs that the CMakeLists.txt of examples/<language> makes."""
    source = shutil.copytree(EXAMPLES / language, folder / f"{language}-source")
    built = folder / f"{language}-built"
    run("cmake", "-S", source, "-B", built, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release", *flags)
    run("cmake", "--build", built)
    return built


def compiled_by_pkg_config(source: Path, prefix: Path, folder: Path) -> Path:
    found = next(prefix.rglob("bmoe.pc")).parent
    words = run("pkg-config", "--cflags", "--libs", "bmoe", PKG_CONFIG_PATH=str(found)).split()
    rpath = run("pkg-config", "--variable=libdir", "bmoe", PKG_CONFIG_PATH=str(found)).strip()
    copied = shutil.copytree(source.parent, folder / f"{source.name}-source") / source.name
    compiler, standard = ("cc", "c99") if source.suffix == ".c" else ("c++", "c++17")
    program = folder / source.stem
    run(compiler, f"-std={standard}", *STRICT, "-O2", copied, "-o", program, *words, "-lm", f"-Wl,-rpath,{rpath}")
    return program


def build_cpp_host(how: str, prefix: Path, folder: Path) -> Path:
    if how == "CMake":
        return configured_by_cmake("cpp", prefix, folder) / "decide"
    return compiled_by_pkg_config(EXAMPLES / "cpp" / "decide.cpp", prefix, folder)
