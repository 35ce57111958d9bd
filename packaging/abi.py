"""What a program compiled against bmoe.h relies on, as text: symbols, signatures, layouts and values.

abi.py HEADER LIBRARY          prints the description of these two
abi.py HEADER LIBRARY FILE     and writes it there, as `make abi` does with csrc/abi.txt

Names and types are read from the header by cffi, layouts by the C compiler, symbols from the library by nm.
Pointers and size_t of 64 bits are taken for granted.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cffi import FFI


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or "cc")


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(header: Path) -> FFI:
    ffi = FFI()
    ffi.cdef(run(*compiler(), "-E", "-P", "-DBMOE_CDEF", header))
    return ffi


def function_names(header: Path) -> list[str]:
    return sorted(set(re.findall(r"^BMOE_API [^;(]*?(bmoe_\w+)\(", header.read_text(encoding="utf-8"), re.MULTILINE)))


def symbols(library: Path) -> list[str]:
    """The library's name for the loader, and each exported symbol with its version."""
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", run("readelf", "-dW", library))
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()]
    return [f"soname {name}" for name in soname] + [f"symbol {name}" for name in sorted(exported)]


def declarations(ffi: FFI) -> Iterator[tuple[str, Any]]:
    """Name and type of each struct, enum and function pointer, as C spells it."""
    typedefs, structs, _ = ffi.list_types()
    for name in typedefs:
        if name not in structs:  # hooks, and handles
            yield name, ffi.typeof(name)
    for name in structs:
        yield f"struct {name}", ffi.typeof(f"struct {name}")


def values(ffi: FFI, header: Path) -> Iterator[str]:
    for name in sorted(set(re.findall(r"^enum (\w+) \{", header.read_text(encoding="utf-8"), re.MULTILINE))):
        for constant, value in sorted(ffi.typeof(f"enum {name}").relements.items(), key=lambda item: item[1]):
            yield f"enum {name}.{constant} = {value}"


def layouts(ffi: FFI, header: Path) -> list[str]:
    """Size of each struct, offset and size of each field, by the compiler."""
    lines = []
    for name, kind in declarations(ffi):
        if kind.kind != "struct" or kind.fields is None:
            continue
        lines.append(f'printf("{name}: %zu bytes\\n", sizeof({name}));')
        for field, what in kind.fields:
            where = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} at %zu, %zu bytes: {what.type.cname}\\n", {where});')
    source = "#include <bmoe.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        unit, program = Path(folder, "layouts.c"), Path(folder, "layouts")
        unit.write_text(source, encoding="utf-8")
        run(*compiler(), "-std=c99", "-I", header.parent, unit, "-o", program)
        return run(program).splitlines()


def signatures(ffi: FFI, header: Path) -> Iterator[str]:
    parsed = ffi._parser._declarations  # type: ignore[attr-defined]  # cffi shows functions of a loaded library only
    for name in function_names(header):
        kind, _ = parsed[f"function {name}"]
        yield f"function {kind.get_c_name().replace('(*)', ' ' + name, 1)}"
    for name, what in declarations(ffi):
        if what.kind == "function":
            yield f"hook {name}: {what.cname}"


def describe(header: Path, library: Path) -> str:
    ffi = parse(header)
    parts = [symbols(library), list(signatures(ffi, header)), list(values(ffi, header)), layouts(ffi, header)]
    return "\n".join("\n".join(part) + "\n" for part in parts)


def main(arguments: list[str]) -> int:
    header, library, *files = map(Path, arguments)
    text = describe(header, library)
    if not files:
        sys.stdout.write(text)
        return 0
    (file,) = files
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    file.write_text(text, encoding="utf-8")
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), "before", "now", n=0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
