"""A process in a memory cgroup of its own, of either version."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")


@contextmanager
def limited(n_bytes: int) -> Iterator[Path]:
    """A fresh group with this limit of memory; the test is skipped, with the reason, where none can be made."""
    is_v1 = (MOUNT / "memory" / "memory.limit_in_bytes").exists()
    group = (MOUNT / "memory" if is_v1 else MOUNT) / f"bmoe-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(n_bytes))
        except OSError as error:
            pytest.skip(f"no limit of memory can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def run_in(group: Path, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """The command, in the group from its first instruction on."""
    into = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', group, *command]
    return subprocess.run(list(map(str, into)), capture_output=True, text=True, timeout=120, check=False)
