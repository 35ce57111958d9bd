"""bmoe.h, preprocessed with -DBMOE_CDEF, to the module of declarations that cffi loads. Run by CMake."""

import sys
from pathlib import Path

from cffi import FFI


def generate(declarations: Path, module: Path) -> None:
    ffi = FFI()
    ffi.set_source("bmoe_native._bmoe_cffi", None)
    ffi.cdef(declarations.read_text(encoding="utf-8"))
    ffi.emit_python_code(str(module))


if __name__ == "__main__":
    generate(Path(sys.argv[1]), Path(sys.argv[2]))
