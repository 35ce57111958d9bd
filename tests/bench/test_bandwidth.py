"""Reads at random: what they are of, and how they are made. No timing."""

import errno
import os
from pathlib import Path

import pytest

from bmoe.bench import bandwidth
from bmoe.bench.expert_ranges import Request, expert_requests
from tests.bench.short import PROBE_S


class TestProbe:
    @pytest.mark.parametrize("direct", [True, False])
    def test_what_it_reads(self, moe: Path, direct: bool) -> None:
        probe = bandwidth.probe(expert_requests([moe]), n_threads=2, direct=direct, for_s=PROBE_S)
        assert probe.n_requests >= 2
        assert probe.n_bytes >= probe.n_requests * expert_requests([moe])[0].n_bytes
        assert probe.bytes_per_s > 0

    @pytest.mark.parametrize("refused", ["open", "preadv"])
    def test_a_file_system_that_refuses_direct_reads(
        self, moe: Path, monkeypatch: pytest.MonkeyPatch, refused: str
    ) -> None:
        direct: set[int] = set()
        really_open, really_read = os.open, os.preadv

        def opened(path: Path, flags: int) -> int:
            if flags & os.O_DIRECT and refused == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
            file = really_open(path, flags & ~os.O_DIRECT)
            (direct.add if flags & os.O_DIRECT else direct.discard)(file)
            return file

        def read(file: int, buffers: list[memoryview], offset: int) -> int:
            if file in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return really_read(file, buffers, offset)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", read)
        probe = bandwidth.probe(expert_requests([moe]), n_threads=2, direct=True, for_s=PROBE_S)
        assert not probe.is_direct
        assert probe.n_bytes > 0

    def test_what_cannot_be_read_raises(self, moe: Path, tmp_path: Path) -> None:
        gone = [Request(tmp_path / "gone.gguf", 0, 4096)]
        with pytest.raises(FileNotFoundError):
            bandwidth.probe(gone, n_threads=1, direct=True, for_s=PROBE_S)
