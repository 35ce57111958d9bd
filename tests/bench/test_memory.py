"""What is in use, what bounds it, and what limits it."""

from pathlib import Path

import pytest

from bmoe.bench.memory import AnonymousPeak, Bound, BufferLog, cgroup_memory
from bmoe_native import Engine
from bmoe_native.types import Streaming
from tests import tiny
from tests.bench.short import EVERYTHING, measured

MIB = 2**20
SAID = """\
load_tensors:   CPU_Mapped model buffer size =  8444.66 MiB
load_tensors:   CPU_REPACK model buffer size =   243.00 MiB
load_tensors: bmoe_experts model buffer size =  8370.00 MiB
llama_context:        CPU  output buffer size =     1.00 MiB
llama_kv_cache:        CPU KV buffer size =   192.00 MiB
llama_kv_cache:        CPU KV buffer size =     8.00 MiB
llama_kv_cache: size =  192.00 MiB (  4096 cells,  24 layers,  1/1 seqs), K (f16):   96.00 MiB, V (f16):   96.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     4.00 MiB
sched_reserve:        CPU compute buffer size =    90.00 MiB
sched_reserve:        CPU compute buffer size =    95.00 MiB
"""


class TestBound:
    def test_what_is_neither_mapped_nor_streamed(self) -> None:
        log = BufferLog()
        assert log.bound(1, 0) is None
        for line in SAID.splitlines():
            log(2, line)
        bound = log.bound(1000 * MIB, 0)
        assert bound == Bound(dense_bytes=243 * MIB, buffers_bytes=300 * MIB, cache_bytes=1000 * MIB)
        assert bound.n_bytes == 1543 * MIB

    @pytest.mark.parametrize("arch", ["qwen3moe", "qwen3next"])
    def test_it_is_what_this_llama_cpp_says(self, tmp_path: Path, arch: str) -> None:
        log, lines = BufferLog(), []

        def noted(level: int, text: str) -> None:
            lines.append(text)
            log(level, text)

        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0), on_log=noted, log_level=2):
            said = [line for line in lines if "buffer size" in line]
        bound = log.bound(0, 0)
        assert bound is not None and bound.dense_bytes == 0
        sizes = [float(line.split("=")[1].split()[0]) for line in said if " model " not in line]
        assert bound.buffers_bytes == pytest.approx(sum(sizes) * MIB, abs=1)
        assert {"KV", "output", "compute"} <= {word for line in said for word in line.split()}


class TestPeaks:
    def test_of_samples_the_most(self) -> None:
        samples = iter([5, 9, 7])
        with AnonymousPeak(lambda: next(samples, 1)) as peak:
            assert peak.n_bytes is not None
            while peak.n_bytes < 9:
                pass
        assert peak.n_bytes == 9

    def test_none_where_the_system_does_not_tell(self) -> None:
        with AnonymousPeak(lambda: None) as peak:
            pass
        assert peak.n_bytes is None

    def test_of_a_measurement(self, moe: Path) -> None:
        memory = measured(moe, lengths=(20,), repeat=1, streaming=EVERYTHING).memory
        assert memory.anonymous_bytes is not None
        assert memory.anonymous_bytes > 2**20


class TestCgroups:
    @pytest.mark.parametrize(
        ("lines", "folder", "names"),
        [
            ("5:cpu:/\n4:memory:/a/b\n0::/\n", "memory/a/b", ("memory.max_usage_in_bytes", "memory.limit_in_bytes")),
            ("4:memory:/outside\n", "memory", ("memory.max_usage_in_bytes", "memory.limit_in_bytes")),
            ("0::/a.slice/b:c\n", "a.slice/b:c", ("memory.peak", "memory.max")),
        ],
    )
    def test_cgroups_of_both_versions(self, tmp_path: Path, lines: str, folder: str, names: tuple[str, str]) -> None:
        place = tmp_path / "mount" / folder
        place.mkdir(parents=True)
        membership = tmp_path / "cgroup"
        membership.write_text(lines)
        for name, text in zip(names, ("1000\n", "4294967296\n"), strict=True):
            (place / name).write_text(text)
        assert cgroup_memory(membership, tmp_path / "mount") == (1000, 2**32)
        for unlimited in ("max\n", "9223372036854771712\n"):
            (place / names[1]).write_text(unlimited)
            assert cgroup_memory(membership, tmp_path / "mount") == (1000, None)

    def test_no_cgroup(self, tmp_path: Path) -> None:
        assert cgroup_memory(tmp_path / "none", tmp_path) == (None, None)
