"""How fast single experts can be read when nothing else is to be done."""

import contextlib
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bmoe.bench.expert_ranges import MAX_REQUEST_BYTES, Request

BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Reads of single experts at random, as the engine makes them, with nothing else to do."""

    is_direct: bool  # past the page cache
    n_threads: int
    n_bytes: int
    n_requests: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / self.elapsed_s


def probe(requests: Sequence[Request], *, n_threads: int, direct: bool, for_s: float) -> Probe:
    """Read requests at random for a while: past the page cache, or where that is refused or not wanted through it.

    Raises: OSError.
    """
    if direct:
        with contextlib.suppress(_NotDirect):
            return _probed(requests, n_threads, os.O_DIRECT, for_s)
    return _probed(requests, n_threads, 0, for_s)


class _NotDirect(Exception):
    """The file system refuses direct reads."""


def _probed(requests: Sequence[Request], n_threads: int, flag: int, for_s: float) -> Probe:
    files: dict[Path, int] = {}
    counts: list[int] = []  # bytes of each read
    failed: list[OSError] = []
    over = threading.Event()

    def read_some(seed: int) -> None:
        draw = random.Random(seed)
        with mmap.mmap(-1, MAX_REQUEST_BYTES + 2 * BLOCK) as buffer, memoryview(buffer) as room:
            try:
                while True:
                    counts.append(_read(files, draw.choice(requests), room, bool(flag)))
                    if over.is_set():
                        return
            except OSError as error:
                failed.append(error)
                over.set()

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(n_threads)]
    began = time.perf_counter()
    try:
        for path in {request.path for request in requests}:
            files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
        for thread in threads:
            thread.start()
        over.wait(for_s)
    except OSError as error:
        failed.append(error)
    finally:
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        elapsed_s = time.perf_counter() - began
        for file in files.values():
            os.close(file)
    if failed and flag:
        raise _NotDirect from failed[0]
    if failed:
        raise failed[0]
    return Probe(
        is_direct=bool(flag), n_threads=n_threads, n_bytes=sum(counts), n_requests=len(counts), elapsed_s=elapsed_s
    )


def _read(files: dict[Path, int], request: Request, room: memoryview, is_direct: bool) -> int:
    """Whole blocks around it; what the page cache holds of them is not read from there."""
    file = files[request.path]
    begin = request.offset // BLOCK * BLOCK
    size = -(-(request.offset + request.n_bytes) // BLOCK) * BLOCK - begin
    if not is_direct:
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_DONTNEED)
    with room[:size] as part:
        return os.preadv(file, [part], begin)
