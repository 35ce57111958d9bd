"""The benchmark of two ways to read: it compiles, prints every comparison, and says so where there is no io_uring."""

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "benchmarks" / "reads.c"
FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-Werror", "-pthread"]
FEWEST_FILES = 4  # the standard three and the one that is read
NO_RING = 3


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "reads"
    subprocess.run(["cc", *FLAGS, "-DROUNDS=1", "-DPART_MIB=4", "-o", path, SOURCE], check=True, timeout=60)
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(65 << 20))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{path} cannot be read past the page cache: {error}")
    return path


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (program, *arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.optional
def test_each_comparison_is_printed(program: Path, weights: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
    done = run(program, weights)
    read_bytes = 512 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before)
    if done.returncode == NO_RING:
        pytest.skip(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_bytes == pytest.approx(10 * 2 * (3 * 308 * 4096 + (4 << 20)), rel=0.02)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [size, memory, str(depth)]
        for size in ("1.2", "4.0")
        for memory in ("kept", "fresh")
        for depth in (1, 2, 4, 8, 16)
    ]
    for row in rows:
        threads, ring, ratio = float(row[3]), float(row[4]), float(re.split(" ", row[5])[0])
        assert threads > 0 and ratio == pytest.approx(ring / threads, rel=0.05, abs=0.01)


def test_where_no_ring_can_be_had_it_says_so(program: Path, weights: Path) -> None:
    limit = f"ulimit -n {FEWEST_FILES}; exec {program} {weights}"
    done = run(Path("/bin/sh"), "-c", limit)
    assert (done.returncode, done.stderr) == (NO_RING, "")
    assert re.fullmatch(r"io_uring_setup: .+\n", done.stdout)


@pytest.mark.parametrize("what", ["short", "missing", "nothing"])
def test_what_cannot_be_read_is_an_error(program: Path, weights: Path, what: str) -> None:
    arguments = {"short": [weights], "missing": [weights.with_name("none")], "nothing": []}[what]
    os.truncate(weights, 1 << 20)
    done = run(program, *arguments)
    if done.returncode == NO_RING:
        pytest.skip(done.stdout)
    assert done.returncode == 1
    assert {"short": "too small", "missing": "No such file", "nothing": "usage"}[what] in done.stderr
