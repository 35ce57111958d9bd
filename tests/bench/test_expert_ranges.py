"""Where experts lie in a file: every byte of them, as the gguf package finds them."""

from pathlib import Path

import gguf
import pytest

from bmoe.bench import expert_ranges
from bmoe_native import Engine
from bmoe_native.types import Streaming
from tests import tiny


class TestRanges:
    @pytest.mark.parametrize("arch", sorted(tiny.FAMILIES))
    def test_every_byte_of_them_and_no_other(self, tmp_path: Path, arch: str) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        with Engine.open(path, inspect=True) as engine:
            info = engine.info
        if info.experts_bytes:
            with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0)) as engine:
                info = engine.info
        paths = expert_ranges.shards(path, info.n_shards)
        assert len(paths) == info.n_shards
        assert sum(request.n_bytes for request in expert_ranges.expert_requests(paths)) == info.streamed_bytes

    def test_they_are_where_the_gguf_package_finds_them(self, moe: Path) -> None:
        wanted = []
        for tensor in gguf.GGUFReader(moe).tensors:
            if "_exps.weight" in tensor.name:
                part = int(tensor.n_bytes) // int(tensor.shape[2])
                wanted += [(int(tensor.data_offset) + n * part, part) for n in range(int(tensor.shape[2]))]
        assert [(request.offset, request.n_bytes) for request in expert_ranges.expert_requests([moe])] == sorted(wanted)

    def test_large_ones_are_cut_as_the_engine_cuts_them(self, moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = expert_ranges.expert_requests([moe])
        monkeypatch.setattr(expert_ranges, "MAX_REQUEST_BYTES", whole[0].n_bytes - 100)
        cut = expert_ranges.expert_requests([moe])
        assert [request.n_bytes for request in cut[:2]] == [whole[0].n_bytes - 100, 100]
        assert sum(request.n_bytes for request in cut) == sum(request.n_bytes for request in whole)

    def test_shards_are_named_after_the_first(self, tmp_path: Path) -> None:
        first = tmp_path / "m-00001-of-00003.gguf"
        assert [path.name for path in expert_ranges.shards(first, 3)] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        assert expert_ranges.shards(first, 1) == [first]
