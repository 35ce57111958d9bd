"""The page cache, dropped by who may."""

import os
from pathlib import Path

import pytest

from bmoe import Refused
from bmoe.bench.page_cache import drop_caches, forget


class TestAll:
    def test_the_caches_are_dropped_by_who_may(self, tmp_path: Path) -> None:
        file = tmp_path / "drop_caches"
        drop_caches(file)
        assert file.read_text() == "3\n"
        with pytest.raises(Refused, match="only root"):
            drop_caches(tmp_path / "nowhere" / "drop_caches")


class TestOfAModel:
    def test_all_files_where_that_is_allowed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "posix_fadvise", None)
        file = tmp_path / "drop_caches"
        assert forget([tmp_path / "nowhere"], file) == "drop_caches"
        assert file.read_text() == "3\n"

    def test_else_each_of_its_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        paths = [tmp_path / "a", tmp_path / "b"]
        for path in paths:
            path.write_text("x")

        def advise(file: int, offset: int, size: int, advice: int) -> None:
            asked.append((Path(os.readlink(f"/proc/self/fd/{file}")), offset, size, advice))

        monkeypatch.setattr(os, "posix_fadvise", advise)
        assert forget(paths, tmp_path / "nowhere" / "drop_caches") == "fadvise"
        assert asked == [(path, 0, 0, os.POSIX_FADV_DONTNEED) for path in paths]

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            forget([tmp_path / "gone"], tmp_path / "nowhere" / "drop_caches")
