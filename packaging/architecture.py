"""The map of the code in docs/architecture.md, drawn from the imports and includes that are there.

architecture.py          writes it into the page
architecture.py check    fails where the page's is another
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map: make map draws it -->\n", "<!-- end of the map -->\n"
PACKAGES = ("bmoe", "bmoe_native")
CSRC = ROOT / "csrc"


def unit_of(path: Path) -> str:
    """What a Python file is counted under: its folder, and in bmoe/ itself its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts) if parts[0] == "bmoe" and len(parts) == 2 else "/".join(parts[:-1])


def unit_named(module: str) -> str | None:
    """The unit that an imported module belongs to, or None where it is not ours."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*parts)
    if path.with_suffix(".py").is_file():
        return unit_of(path.with_suffix(".py"))
    return unit_of(path / "__init__.py") if path.is_dir() else unit_named(".".join(parts[:-1]))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_edges() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            unit = unit_of(path)
            mine = edges.setdefault(unit, set())
            mine |= {found for name in imported(path) if (found := unit_named(name))} - {unit}
    return edges


def c_edges() -> dict[str, set[str]]:
    """Each piece of csrc (a .cpp and its header are one) to those it includes; llama.cpp counts as one."""
    edges: dict[str, set[str]] = {}
    for path in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")]):
        if path.parent.name == "include":
            continue
        unit = path.relative_to(CSRC).with_suffix("").as_posix()
        mine = edges.setdefault(unit, set())
        for name in re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            if (CSRC / name).is_file():
                mine.add(Path(name).with_suffix("").as_posix())
            else:
                mine.add("bmoe.h" if name == "bmoe.h" else "llama.cpp")
        mine -= {unit}
    return edges


def table(edges: dict[str, set[str]], title: str) -> str:
    lines = [f"| {title} | uses |", "| --- | --- |"]
    for unit in sorted(edges):
        uses = ", ".join(f"`{used}`" for used in sorted(edges[unit])) or "nothing of ours"
        lines.append(f"| `{unit}` | {uses} |")
    return "\n".join(lines) + "\n"


def drawn() -> str:
    return f"{table(python_edges(), 'Python')}\n{table(c_edges(), 'csrc')}"


def split(page: str) -> tuple[str, str, str]:
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main(arguments: list[str]) -> int:
    before, inside, after = split(PAGE.read_text(encoding="utf-8"))
    if arguments == ["check"]:
        if inside == drawn():
            return 0
        print("docs/architecture.md shows another map than the code has: make map", file=sys.stderr)
        return 1
    PAGE.write_text(f"{before}{BEGIN}{drawn()}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
