"""What of memory is in use, what bounds it, and what limits it."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SAMPLE_EVERY_S = 0.01
_UNLIMITED_BYTES = 1 << 60  # version 1 of cgroups writes "no limit" as a number above it
# As llama.cpp says, at the level of LOG_INFO, what it allocates.
_BUFFER = re.compile(r"(\w+):\s+(\w+)\s+(model|KV|RS|compute|output) buffer size =\s*([\d.]+) MiB")
_MAPPED, _STREAMED = "_Mapped", "bmoe_experts"
LOG_INFO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a streamed decision keeps in anonymous memory from one graph to the next, at most."""

    dense_bytes: int  # of weights that do not stream and are not mapped; copies in another layout, too
    buffers_bytes: int  # to compute in: KV, recurrent state, compute, output
    cache_bytes: int  # budget of experts

    @property
    def n_bytes(self) -> int:
        return self.dense_bytes + self.buffers_bytes + self.cache_bytes


class BufferLog:
    """An engine's log, read for the buffers that it opens with."""

    def __init__(self) -> None:
        self._dense_mib = 0.0
        self._buffers_mib = 0.0
        self._compute_mib = 0.0

    def __call__(self, level: int, text: str) -> None:
        found = _BUFFER.search(text)
        if not found:
            return
        _, owner, kind, size = found.groups()
        if kind == "compute":  # allocated anew where it has to grow
            self._compute_mib = max(self._compute_mib, float(size))
        elif kind != "model":
            self._buffers_mib += float(size)
        elif not owner.endswith(_MAPPED) and owner != _STREAMED:
            self._dense_mib += float(size)

    def bound(self, cache_bytes: int, unmapped_bytes: int) -> Bound | None:
        """With a budget of experts, and what llama.cpp takes for mapped and is not; None where it said nothing."""
        if not self._compute_mib:
            return None
        return Bound(
            dense_bytes=round(self._dense_mib * 2**20) + unmapped_bytes,
            buffers_bytes=round((self._buffers_mib + self._compute_mib) * 2**20),
            cache_bytes=cache_bytes,
        )


class AnonymousPeak:
    """Most anonymous memory of this process at any sample, in a `with`."""

    def __init__(self, sample: Callable[[], int | None] | None = None) -> None:
        self._sample = sample or anonymous_bytes
        self.n_bytes = self._sample()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def _watch(self) -> None:
        while self.n_bytes is not None and not self._over.wait(SAMPLE_EVERY_S):
            self._note()

    def _note(self) -> None:
        if self.n_bytes is not None:
            self.n_bytes = max(self.n_bytes, self._sample() or 0)


def anonymous_bytes() -> int | None:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", _content(Path("/proc/self/status")), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def cgroup_memory(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> (
    tuple[int | None, int | None]
):  # fmt: skip
    """(peak, limit) in bytes of the memory cgroup this process is in, version 1 or 2; None: none, or not told."""
    for line in _content(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, peak, limit = mount / "memory", "memory.max_usage_in_bytes", "memory.limit_in_bytes"
        elif not controllers:
            folder, peak, limit = mount, "memory.peak", "memory.max"
        else:
            continue
        inner = folder / name.lstrip("/")
        # In a container the name may be one of outside.
        place = inner if (inner / limit).exists() else folder
        if (place / limit).exists():
            return _bytes_in(place / peak), _bytes_in(place / limit)
    return None, None


def _bytes_in(file: Path) -> int | None:
    text = _content(file).strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED_BYTES else None


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
