"""Streamed experts: what is read, kept and given back, and what happens when a read goes wrong."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, ReadError, Streaming, UnsupportedError
from tests import tiny

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "m.gguf", arch="qwen3moe")


@pytest.fixture
def resident(path: Path) -> np.ndarray:
    with Engine.open(path, n_threads=1, repack=False) as engine:
        engine.prefill(TOKENS)
        return engine.logits()


def opened(path: Path, **options: object) -> Engine:
    return Engine.open(path, n_threads=1, streaming=Streaming(**options))  # type: ignore[arg-type]


def test_nothing_is_kept_without_a_cache_and_everything_in_one_that_holds_it(path: Path) -> None:
    with opened(path, cache_bytes=0, look_ahead=False) as engine:
        for _ in range(2):
            engine.drop_state()
            result = engine.prefill(TOKENS)
            assert result.n_hits == 0 < result.n_misses
            assert result.routed_bytes <= result.read_bytes < 1.3 * result.routed_bytes  # blocks around the slices
            assert engine.counters().resident_bytes == 0
    with opened(path, cache_bytes=1 << 30) as engine:
        first = engine.prefill(TOKENS)
        engine.drop_state()
        second = engine.prefill(TOKENS)
        assert first.read_bytes > 0 == second.read_bytes == second.n_misses
        assert second.n_hits == first.n_hits + first.n_misses
        assert engine.counters().resident_bytes <= engine.info.experts_bytes == engine.info.streamed_bytes


def test_the_cache_stays_within_its_budget_and_follows_a_new_one(path: Path, resident: np.ndarray) -> None:
    with opened(path, cache_bytes=1 << 30) as engine:
        engine.prefill(TOKENS)
        whole = engine.counters().resident_bytes
        for budget in (whole // 2, whole // 5, 0, whole):
            engine.set_cache(budget)
            assert engine.counters().resident_bytes <= budget
            assert engine.info.cache_bytes == 1 << 30  # as opened
            engine.drop_state()
            engine.prefill(TOKENS)
            np.testing.assert_array_equal(engine.logits(), resident)
            assert engine.counters().resident_bytes <= budget


def test_what_is_given_back_is_memory(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="granitehybrid")

    def anonymous() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

    with opened(path, cache_bytes=1 << 30) as engine:
        engine.prefill(TOKENS)
        held, before = engine.counters().resident_bytes, anonymous()
        engine.set_cache(0)
        assert before - anonymous() > 0.8 * held > 1 << 20


@pytest.mark.parametrize("guess", ["both", "previous", "router"])
def test_what_is_guessed_is_read_ahead_and_changes_no_bit(path: Path, resident: np.ndarray, guess: str) -> None:
    with opened(path, cache_bytes=0, guess=guess) as engine:
        first = engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)
        assert (first.ahead_bytes > 0) == (guess != "previous")  # nothing was asked for before
        engine.drop_state()
        assert engine.prefill(TOKENS).ahead_bytes > 0
        np.testing.assert_array_equal(engine.logits(), resident)
    with pytest.raises(ArgumentError, match="guess is 'x', allowed are both, previous, router"):
        opened(path, guess="x")


def test_a_dense_model_has_nothing_to_stream(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "dense.gguf", arch="llama")
    with opened(path) as engine, Engine.open(path, n_threads=1) as plain:
        assert not engine.info.is_streamed
        for one in (engine, plain):
            one.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), plain.logits())
        with pytest.raises(UnsupportedError, match="nothing streams"):
            engine.set_cache(1)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"io_threads": 65}, "io_threads is 65"), ({"cache_bytes": -2}, "cache_bytes is -2"), ({"io_threads": -1}, "-1")],
)
def test_options_out_of_range_are_refused(path: Path, options: dict[str, int], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        opened(path, **options)


def test_inspecting_streams_nothing(path: Path) -> None:
    with Engine.open(path, inspect=True, streaming=Streaming()) as engine:
        assert not engine.info.is_streamed


def test_a_cancel_leaves_no_reads_behind(path: Path, resident: np.ndarray) -> None:
    with Engine.open(path, n_threads=1, n_ubatch=16, streaming=Streaming(cache_bytes=0)) as engine:
        engine.cancel()
        assert engine.prefill(TOKENS).cancelled
        engine.prefill(TOKENS[:32])
    with opened(path, cache_bytes=0) as engine:
        engine.cancel()
        assert engine.prefill(TOKENS).cancelled
        engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)


@pytest.mark.parametrize("how", ["cut", "touched", "grown"])
def test_a_file_that_changes_in_use_is_an_error_that_names_it(path: Path, how: str) -> None:
    whole = path.read_bytes()
    with opened(path, cache_bytes=0) as engine:
        engine.prefill(TOKENS)
        if how == "touched":
            os.utime(path, ns=(1, 1))
        else:
            os.truncate(path, len(whole) // 2 if how == "cut" else len(whole) + 1)
        engine.drop_state()
        with pytest.raises(ReadError, match=r"changed while it was open.*m\.gguf"):
            engine.prefill(TOKENS)


def test_a_file_that_is_replaced_or_removed_is_read_on(path: Path, resident: np.ndarray, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other.gguf", arch="qwen3moe", seed=9)
    with opened(path, cache_bytes=0) as engine:
        engine.prefill(TOKENS)
        os.replace(other, path)
        engine.drop_state()
        engine.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), resident)


def test_where_direct_reads_are_refused_the_page_cache_serves(path: Path, resident: np.ndarray) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    copy = shm / f"bmoe-{os.getpid()}.gguf"
    shutil.copy(path, copy)
    try:
        with opened(copy, cache_bytes=0) as engine:
            engine.prefill(TOKENS)
            np.testing.assert_array_equal(engine.logits(), resident)
    finally:
        copy.unlink()


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int n_calls;
static int fails(void) {
    const char *fault = getenv("FAULT");
    if (!fault) return 0;
    const int call = __sync_fetch_and_add(&n_calls, 1);
    errno = !strcmp(fault, "eintr") && call % 2 ? EINTR : !strcmp(fault, "eio") && call == 9 ? EIO : 0;
    return errno != 0;
}
ssize_t pread(int file, void *to, size_t n, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t) = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    const char *fault = getenv("FAULT");
    if (fails()) return -1;
    return real(file, to, fault && !strcmp(fault, "short") && n > 4096 ? n / 2 : n, offset);
}
ssize_t preadv(int file, const struct iovec *parts, int n_parts, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) =
        (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, "preadv");
    const char *fault = getenv("FAULT");
    if (fault && !strcmp(fault, "einval")) { errno = EINVAL; return -1; }
    if (fault && !strcmp(fault, "slow")) usleep(200000);
    if (fails()) return -1;
    return real(file, parts, fault && !strcmp(fault, "short") ? 1 : n_parts, offset);
}
"""
PROGRAM = """
    import os, sys
    import numpy as np
    from bmoe_native import Engine, ReadError, Streaming
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(sys.argv[1], n_threads=1, streaming=Streaming(cache_bytes=1 << 30)) as engine:
        os.environ["FAULT"] = sys.argv[3]  # putenv: the shim sees it from here on
        try:
            engine.prefill(tokens)
        except ReadError as error:
            print("error", engine.position, error)
            os.environ["FAULT"] = "none"
            engine.prefill(tokens)
        sys.stdout.flush()
        sys.stdout.buffer.write(engine.logits().tobytes())
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    yield library


@pytest.mark.parametrize("fault", ["short", "einval", "eintr", "eio"])
def test_reads_that_stop_early_or_fail(path: Path, resident: np.ndarray, shim: Path, fault: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), path, " ".join(map(str, TOKENS)), fault]
    done = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout[: len(done.stdout) - resident.nbytes].decode()
    if fault == "eio":
        assert "Input/output error" in said and "m.gguf" in said and "expert " in said and " of layer " in said
        assert said.startswith("error 0 ")
    else:
        assert said == ""
    np.testing.assert_array_equal(np.frombuffer(done.stdout[-resident.nbytes :], np.float32), resident)


def test_fewer_experts_per_token_are_another_model_and_fewer_bytes(path: Path, resident: np.ndarray) -> None:
    with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0), n_expert_used=2) as engine:
        two = engine.prefill(TOKENS).routed_bytes
        np.testing.assert_array_equal(engine.logits(), resident)
    with Engine.open(path, n_threads=1, streaming=Streaming(cache_bytes=0), n_expert_used=1) as engine:
        assert engine.info.n_expert_used == 1
        assert engine.prefill(TOKENS[:5]).routed_bytes < two
        engine.drop_state()
        engine.prefill(TOKENS)
        assert (engine.logits() != resident).any()


def test_more_experts_than_there_are_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="9 experts per token are asked for, and this model has 8"):
        Engine.open(path, n_expert_used=9)
    with pytest.raises(ArgumentError, match="this model has 0"):
        Engine.open(tiny.write(tmp_path / "dense.gguf"), n_expert_used=1)


SLOW = """
    import os, sys, threading
    import numpy as np
    from bmoe_native import Engine, Streaming
    tokens = [int(token) for token in sys.argv[2].split()]
    with Engine.open(sys.argv[1], n_threads=1, streaming=Streaming(cache_bytes=0, io_threads=1)) as engine:
        os.environ["FAULT"] = "slow"
        threading.Timer(0.5, engine.cancel).start()
        result = engine.prefill(tokens)
        assert result.cancelled and engine.position == 0, result
        assert 0 < result.n_misses < 24, result  # of three layers with eight experts: it did not go on
        assert result.read_bytes < engine.info.experts_bytes / 6, result  # nor read the first layer to its end
        os.environ["FAULT"] = "none"
        engine.clear_cancel()
        engine.prefill(tokens)
        sys.stdout.buffer.write(engine.logits().tobytes())
"""


def test_a_cancel_is_noticed_while_reads_are_waited_for(path: Path, resident: np.ndarray, shim: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SLOW), path, " ".join(map(str, TOKENS))]
    env = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), resident)
