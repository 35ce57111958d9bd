"""The pinned llama.cpp: fetched, verified and built into the cache, once per pin, flags and compiler.

Prints the path of a CMake file that defines its static libraries. What it does meanwhile is told on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PIN_NAME = "llama-cpp-python"
PIN_VERSION = "0.3.36"
PIN_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PIN_COMMIT = "0c1e57098"
PIN_MB = 77

FETCH_MB = 520  # the sdist twice (pip copies it), what pip unpacks to read its metadata, the tree that stays
BUILD_MB = 160

# What a build needs of the tree, its licence, and the chat templates that our tests render.
KEPT = ("CMakeLists.txt", "LICENSE", "AUTHORS", "cmake", "common", "ggml", "include", "licenses", "src", "vendor",
        "models/templates")  # fmt: skip

# Which CMake package defines the targets of a namespace, where it is not called like it.
PACKAGES = {"CUDA": "CUDAToolkit", "MUSA": "MUSAToolkit"}

WRAPPER = Path(__file__).resolve().parent / "llama"

FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_C_VISIBILITY_PRESET": "hidden",
    "CMAKE_CXX_VISIBILITY_PRESET": "hidden",
    "CMAKE_POSITION_INDEPENDENT_CODE": "ON",
    "CMAKE_VISIBILITY_INLINES_HIDDEN": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "OFF",  # ggml's own threads, waiting as ours do: docs/decisions/0001-waiting-threads.md
    "LLAMA_ALL_WARNINGS": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_COMMON": "ON",  # chat templates live there
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_SUBPROCESS": "OFF",
    # The cache may lie inside some git checkout, whose commit would be taken for llama.cpp's.
    "CMAKE_DISABLE_FIND_PACKAGE_Git": "ON",
    "GIT_EXE": "OFF",
    "GIT_EXECUTABLE": "OFF",
}

# What GGML_NATIVE=OFF is built for, by the compiler's machine: the levels that docs/wheels.md states. Every option is
# given, so that a new llama.cpp cannot change one.
LEVELS = {
    "x86_64": {
        **dict.fromkeys(("GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"), "ON"),
        **dict.fromkeys(("GGML_AVX_VNNI", "GGML_AVX512", "GGML_AVX512_BF16"), "OFF"),
        **dict.fromkeys(("GGML_AVX512_VBMI", "GGML_AVX512_VNNI"), "OFF"),
        **dict.fromkeys(("GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16"), "OFF"),
    },
    "aarch64": {"GGML_CPU_ARM_ARCH": "armv8.2-a+dotprod"},
}

CC_NAMES = ("cc", "gcc", "clang")
CXX_NAMES = ("c++", "g++", "clang++")
NATIVE_FLAGS = ("-march=native", "-mcpu=native")
CXX_PROBE = "#include <filesystem>\n#include <optional>\nint main() { return std::optional<int>{0}.value(); }\n"


class BuildError(Exception):
    """Why there is no llama.cpp, in one sentence."""


class Progress:
    """What is going on, on stderr: one rewritten line on a terminal, elsewhere a line every tenth or 30 s."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._open = False
        self._tenth = -1
        self._told_s = 0.0

    def say(self, text: str) -> None:
        self.end()
        print(text, file=sys.stderr, flush=True)
        self._tenth, self._told_s = -1, time.monotonic()

    def step(self, text: str, done: float, total: float) -> None:
        tenth = int(10 * done / total)
        if self._tty:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif tenth > self._tenth or time.monotonic() - self._told_s > 30:
            self.say(text)
            self._tenth = tenth

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr, flush=True)
            self._open = False


def default_cache() -> Path:
    return Path(os.environ.get("BMOE_CACHE") or Path.home() / ".cache" / "bmoe").expanduser().resolve()


def run(command: list[str], log: Path, env: Mapping[str, str], tick: Callable[[], None]) -> int:
    """Run with all output in the log. If this process is stopped, what it started is stopped with it."""
    with log.open("ab") as out, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
    ) as process:  # fmt: skip
        try:
            while True:
                try:
                    return process.wait(timeout=0.25)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def tail(log: Path, n_bytes: int = 1 << 14) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - n_bytes))
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def locked(directory: Path, progress: Progress) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another build that is using {directory}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def work_directory(parent: Path) -> Iterator[Path]:
    """A directory to work in, gone afterwards. Only for who holds the lock: it clears what a killed run left."""
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="tmp-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def need_space(directory: Path, need_mb: int, what: str) -> None:
    free_mb = shutil.disk_usage(directory).free // 1_000_000
    if free_mb < need_mb:
        raise BuildError(f"disk full: {what} llama.cpp needs {need_mb} MB in {directory}, where {free_mb} MB are free")


def fetch_sdist(work: Path, kept_log: Path, progress: Progress) -> Path:
    need_space(work, FETCH_MB, "fetching")
    requirement = work / "requirement.txt"
    requirement.write_text(f"{PIN_NAME}=={PIN_VERSION} --hash=sha256:{PIN_SHA256}\n")
    # A hash in the requirement makes pip refuse another archive before it runs anything of it to read its metadata.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PIN_NAME]
    command += ["--no-cache-dir", "--disable-pip-version-check", "-r", str(requirement), "-d", str(work / "sdist")]

    def tick() -> None:
        with contextlib.suppress(OSError):
            mb = max((file.stat().st_size for file in work.glob("*/*.tar.gz")), default=0) // 1_000_000
            progress.step(f"fetching llama.cpp: {mb}/{PIN_MB} MB", min(mb, PIN_MB), PIN_MB)

    progress.say(f"fetching llama.cpp ({PIN_MB} MB, {PIN_NAME} {PIN_VERSION})")
    log = work / "fetch.log"
    code = run(command, log, {**os.environ, "TMPDIR": str(work)}, tick)
    progress.end()
    if code:
        shutil.copyfile(log, kept_log)
        raise BuildError(fetch_failure(tail(log), kept_log))
    return next((work / "sdist").iterdir())


def fetch_failure(output: str, log: Path) -> str:
    what = f"{PIN_NAME} {PIN_VERSION}, the source of llama.cpp"
    got = re.search(r"Got\s+([0-9a-f]{64})", output)
    if got:
        return wrong_hash(what, got[1])
    if "No space left on device" in output:
        return f"disk full while fetching {what} into {log.parent}"
    if "No module named pip" in output:
        return f"cannot fetch {what}: {sys.executable} has no pip; install it, for instance Debian's python3-pip"
    if "No matching distribution" in output or re.search("Retrying|[Cc]onnection|[Tt]imed? ?out", output):
        return f"cannot fetch {what}: it needs the network, or a pip mirror that has it; pip's output is in {log}"
    return f"cannot fetch {what}: pip failed, its output is in {log}"


def wrong_hash(what: str, found: str) -> str:
    return f"wrong hash for {what}: expected sha256 {PIN_SHA256}, found {found}; nothing of it was used"


def unpack(sdist: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with sdist.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != PIN_SHA256:
        raise BuildError(wrong_hash(str(sdist), digest.hexdigest()))
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = member.name.partition("/vendor/llama.cpp/")[2]
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and any(path == kept or path.startswith(f"{kept}/") for kept in KEPT):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                with content, (target / path).open("wb") as out:
                    shutil.copyfileobj(content, out)


def ensure_pinned_source(home: Path, sdist: Path | None, progress: Progress) -> Path:
    source = home / "src"
    if not source.is_dir():
        with work_directory(home) as work:
            archive = sdist or fetch_sdist(work, home / "fetch.log", progress)
            progress.say("unpacking llama.cpp")
            unpack(archive, work / "src")
            (work / "src").rename(source)
    return source


def tree_fingerprint(source: Path) -> str:
    digest = hashlib.sha256(str(source).encode())
    for kept in KEPT:
        for path in sorted((source / kept).rglob("*") if (source / kept).is_dir() else [source / kept]):
            if path.is_file():
                digest.update(f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


def find_compiler(variable: str, names: tuple[str, ...], language: str) -> str:
    """The compiler CMake would choose, as a command; from the environment it may carry arguments."""
    wanted = os.environ.get(variable, "").strip()
    if wanted:
        if shutil.which(shlex.split(wanted)[0]) is None:
            raise BuildError(f"no {language} compiler: {variable} is set to '{wanted}', which is not there")
        return wanted
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(
        f"no {language} compiler found ({', '.join(names)}); install one, "
        f"for instance Debian's g++ or Fedora's gcc-c++, or set {variable}"
    )


def compiler_identity(command: str, native: bool) -> list[str]:
    """What must be the same for its objects to be used: program, version and, if native, this CPU's features."""
    program, *arguments = shlex.split(command)
    prefix = [os.path.realpath(shutil.which(program) or program), *arguments]
    identity = [*prefix, *output_of([*prefix, "--version"]).splitlines()[:1], output_of([*prefix, "-dumpmachine"])]
    if native:
        # The macros it predefines name the instruction sets it will use; they differ where another CPU would trap.
        macros = [output_of([*prefix, flag, "-dM", "-E", "-x", "c", os.devnull]) for flag in NATIVE_FLAGS]
        identity.append(hashlib.sha256("".join(sorted("\n".join(macros).splitlines())).encode()).hexdigest())
    return identity


def target_machine(command: str) -> str:
    """x86_64 or aarch64, or another, from what the compiler calls it."""
    return output_of([*shlex.split(command), "-dumpmachine"]).partition("-")[0]


def output_of(command: list[str]) -> str:
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def check_compiler(cxx: str) -> None:
    command = [*shlex.split(cxx), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=CXX_PROBE, capture_output=True, text=True, errors="replace")
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if "error" in line), "it failed without a reason")
        raise BuildError(f"the C++ compiler '{cxx}' does not compile C++17 ({reason.strip()}); install a newer one")


def job_count(jobs: int | None) -> int:
    """One compiler per CPU, but no more than memory holds: the largest take close to 1 GB each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return jobs or max(1, min(cpus, memory // 1_200_000_000))


def build_environment(compilers: Mapping[str, str]) -> dict[str, str]:
    # The first changes ggml's baseline; the second may name a generator that is not there.
    dropped = ("SOURCE_DATE_EPOCH", "CMAKE_GENERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **compilers, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}


def compile_tree(source: Path, work: Path, flags: Mapping[str, str], compilers: Mapping[str, str], jobs: int | None,
                 kept_log: Path, progress: Progress) -> None:  # fmt: skip
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildError("cmake not found; install it, for instance with: python3 -m pip install cmake ninja")
    need_space(work, BUILD_MB, "building")
    check_compiler(compilers["CXX"])
    environment = build_environment(compilers)
    log = work / "build.log"
    configure = [cmake, "-S", str(WRAPPER), "-B", str(work), f"-DBMOE_LLAMA_SOURCE={source}"]
    configure += [f"-D{name}={value}" for name, value in sorted(flags.items())]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    progress.say("configuring llama.cpp")
    code = run(configure, log, environment, lambda: None)

    def tick() -> None:
        steps = re.findall(r"^\[ *(\d+)(?:/(\d+)|%)\]", tail(log), re.MULTILINE)
        done, total = steps[-1] if steps else ("0", "")
        progress.step(f"building llama.cpp: {done}{'/' + total if total else ' %'}", int(done), int(total or 100))

    if code == 0:
        started_s = time.monotonic()
        code = run([cmake, "--build", str(work), "--parallel", str(job_count(jobs))], log, environment, tick)
        progress.end()
    if code:
        shutil.copyfile(log, kept_log)
        raise BuildError(compile_failure(log, kept_log, progress))
    progress.say(f"built llama.cpp in {time.monotonic() - started_s:.0f} s")


def compile_failure(log: Path, kept_log: Path, progress: Progress) -> str:
    output = tail(log, 1 << 20)
    if "No space left on device" in output:
        return f"disk full while building llama.cpp in {kept_log.parent}"
    if re.search(r"Killed signal|virtual memory exhausted|cannot allocate memory", output, re.IGNORECASE):
        return f"out of memory while building llama.cpp; fewer compilers at once (--jobs 1) need less; log: {kept_log}"
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
    for line in (errors or lines)[-5:]:
        progress.say(f"  {line.rstrip()}")
    return f"llama.cpp did not build; the whole log is {kept_log}"


def describe(work: Path, source: Path, commit: str, relative: bool) -> str:
    """The exported targets, with paths that hold wherever the cache is carried."""
    text = (work / "llama-targets.cmake").read_text()
    text = text.replace(str(work), "${CMAKE_CURRENT_LIST_DIR}").replace(str(source), "${BMOE_LLAMA_SOURCE_DIR}")
    where = "${CMAKE_CURRENT_LIST_DIR}/../src" if relative else str(source)
    head = f'set(BMOE_LLAMA_SOURCE_DIR "{where}")\nset(BMOE_LLAMA_COMMIT "{commit}")\n'
    linked = re.findall(r"INTERFACE_LINK_LIBRARIES \"(.*)\"", text)
    namespaces = sorted({"Threads", *re.findall(r"(?<!::)\b(\w+)::", ";".join(linked))})
    return head + "".join(f"find_package({PACKAGES.get(name, name)} REQUIRED)\n" for name in namespaces) + text


def ensure_llama(cache: Path, *, source: Path | None = None, sdist: Path | None = None,
                 defines: Mapping[str, str] | None = None, jobs: int | None = None) -> Path:  # fmt: skip
    """The CMake file that defines the static libraries, which are built first if need be.

    Raises: BuildError.
    """
    progress = Progress()
    flags = {**FLAGS, **(defines or {})}
    if source is not None:
        source = source.resolve()
        if not (source / "include" / "llama.h").is_file():
            raise BuildError(f"no llama.cpp tree in {source}: include/llama.h is missing")
        home, tree = cache / "llama.cpp" / "other", tree_fingerprint(source)
        commit = output_of(["git", "-C", str(source), "rev-parse", "--short=9", "HEAD"]) or "unknown"
    else:
        home, tree, commit = cache / "llama.cpp" / f"{PIN_VERSION}-{PIN_SHA256[:8]}", PIN_SHA256, PIN_COMMIT
    flags |= {"LLAMA_BUILD_COMMIT": commit, "LLAMA_BUILD_NUMBER": "0"}
    compilers = {"CXX": find_compiler("CXX", CXX_NAMES, "C++"), "CC": find_compiler("CC", CC_NAMES, "C")}
    native = flags["GGML_NATIVE"].upper() in ("ON", "1", "YES", "TRUE", "Y")
    if not native:
        flags = {**LEVELS.get(target_machine(compilers["CXX"]), {}), **flags}
    inputs = {
        "tree": tree,
        "flags": flags,
        "wrapper": {path.name: path.read_text() for path in sorted(WRAPPER.iterdir())},
        "compilers": [compiler_identity(compilers[name], native) for name in ("CC", "CXX")],
        "environment": [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "ASMFLAGS")],
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    result = home / key / "llama.cmake"
    if result.is_file() and (source or home / "src").is_dir():
        return result
    with locked(cache / "llama.cpp", progress):
        tree_path = source or ensure_pinned_source(home, sdist, progress)
        if not result.is_file():
            with work_directory(home) as work:
                compile_tree(tree_path, work, flags, compilers, jobs, home / "build.log", progress)
                (work / "done").mkdir()
                (work / "lib").rename(work / "done" / "lib")
                (work / "done" / "llama.cmake").write_text(describe(work, tree_path, commit, source is None))
                (work / "done" / "inputs.json").write_text(json.dumps(inputs, indent=1, sort_keys=True))
                (work / "done").rename(home / key)
    return result


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help="default: BMOE_CACHE, or ~/.cache/bmoe")
    parser.add_argument("--source", type=Path, help="a llama.cpp tree to use in place of the pinned one")
    parser.add_argument("--sdist", type=Path, help="the pinned archive, already on this disk")
    parser.add_argument("--native", choices=("ON", "OFF"), default="ON", help="OFF: for a build that is to be moved")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="for llama.cpp's CMake")
    parser.add_argument("--jobs", type=int, help="compilers at once")
    return parser.parse_args(arguments)


def as_build_error(error: OSError) -> BuildError:
    if error.errno == errno.ENOSPC:
        return BuildError(f"disk full: {error.filename or 'the cache'} could not be written")
    return BuildError(f"{error.filename or 'the cache'}: {error.strerror}; BMOE_CACHE names another place to build in")


def main(arguments: list[str]) -> int:
    def stop(number: int, _frame: object) -> None:
        print(f"bmoe build: stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    options = parse_arguments(arguments)
    defines = {name: value for name, _, value in (define.partition("=") for define in options.define)}
    try:
        cache = options.cache.expanduser().resolve() if options.cache else default_cache()
        defines.setdefault("GGML_NATIVE", options.native)
        print(ensure_llama(cache, source=options.source, sdist=options.sdist, defines=defines, jobs=options.jobs))
    except (BuildError, OSError) as error:
        print(f"bmoe build: {as_build_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bmoe build: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
