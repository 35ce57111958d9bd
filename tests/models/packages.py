"""Tiny packages that look like those of the catalogue, and a model made of them."""

import hashlib
import zipfile
from pathlib import Path

from bmoe.models import NamedModel

PART_BYTES = 5000
DATA = bytes(range(256)) * 70


def model(data: bytes = DATA, *, package: str = "tiny-gguf-part{part}", sha256: str | None = None) -> NamedModel:
    n_parts = -(-len(data) // PART_BYTES)
    return NamedModel(
        name="tiny",
        package=package,
        version="1.0.0",
        n_parts=n_parts,
        part_bytes=PART_BYTES,
        size_bytes=len(data),
        sha256=sha256 or hashlib.sha256(data).hexdigest(),
        summary="tiny",
    )


def build(folder: Path, data: bytes = DATA) -> NamedModel:
    """Write a wheel for each part into folder."""
    made = model(data)
    for index, package in enumerate(made.packages()):
        wheel(folder, package, data[index * PART_BYTES : (index + 1) * PART_BYTES])
    return made


def wheel(folder: Path, package: str, data: bytes) -> Path:
    module = package.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    path = folder / f"{module}-1.0.0-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        archive.writestr(f"{module}/data/part.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
