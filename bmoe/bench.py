"""What decisions cost on this machine, beside what they cannot do without: computing, and reading what is missing."""

import contextlib
import math
import mmap
import os
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from bmoe.decide import Refused
from bmoe_native import Engine, PrefillResult
from bmoe_native.types import DEFAULT_IO_THREADS, Info, Streaming

BLOCK = 4096
MAX_REQUEST_BYTES = 4 << 20  # of one read of the engine's
PROBE_S = 2.0
FLOOR_RUNS = 2  # of each prompt with everything in memory; the faster one is its floor
SAMPLE_EVERY_S = 0.01
_SHARD = re.compile(r"-00001-of-(\d{5})\.gguf$")
_EXPERTS = re.compile(rb"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's types of fixed size
_UINT32, _STRING, _ARRAY = 4, 8, 9
_UNLIMITED_BYTES = 1 << 60  # version 1 of cgroups writes "no limit" as a number above it
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: prompts of these lengths, `repeat` of each, or these texts.

    Decisions of one length, and all texts, are one run: an engine of their own, whose first decision is cold.

    Raises: Refused.
    """

    lengths: tuple[int, ...] = ()  # tokens
    texts: tuple[tuple[str, str], ...] = ()  # (name, text)
    template: bool = True  # of texts: as a user's message, where the model has a template
    repeat: int = 3
    streaming: Streaming | None = None  # does nothing to a model without routed experts
    repack: bool = True
    n_threads: int = 0
    n_ubatch: int = 0
    n_ctx: int = 0
    drop_caches: bool = False
    probe_s: float = PROBE_S

    def __post_init__(self) -> None:
        if bool(self.lengths) == bool(self.texts):
            raise Refused("give lengths or texts of prompts, one of them")
        if any(length < 1 for length in self.lengths) or self.repeat < 1:
            raise Refused("a prompt has at least one token, and a run at least one prompt")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The same prefill with nothing to wait for."""

    s: float
    estimated_because: str = ""  # empty: measured. Else the decision's own CPU seconds over the threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A prompt from an empty state to the logits after it."""

    name: str
    is_cold: bool  # the first of an engine
    open_s: float  # of that engine
    cache_bytes: int  # its budget
    wall_s: float
    spent: PrefillResult
    missing_bytes: float  # of experts that were routed to and not in memory
    io_floor_s: float
    compute_floor: Floor

    @property
    def floor_s(self) -> float:
        """What it cannot be faster than, however well reading and computing go on side by side."""
        return max(self.io_floor_s, self.compute_floor.s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks while decisions were made. None where the system does not tell."""

    anonymous_bytes: int | None  # of the process, sampled: pages of mapped files are not in it
    cgroup_bytes: int | None  # of all processes of the group since it was made, their page cache included
    cgroup_limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    info: Info  # as first opened
    plan: Plan
    probes: tuple[Probe, ...]  # before and after the decisions; none where nothing streams
    decisions: tuple[Decision, ...]
    memory: Memory

    @property
    def bytes_per_s(self) -> float | None:
        """The better probe's: what the other one gives would be no floor."""
        return max((probe.bytes_per_s for probe in self.probes), default=None)


@dataclass(frozen=True, slots=True)
class _Prompt:
    name: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Made:
    """A decision before its floors are known."""

    prompt: _Prompt
    is_cold: bool
    open_s: float
    cache_bytes: int
    wall_s: float
    spent: PrefillResult


def measure(
    path: Path, plan: Plan, *, open_engine: Callable[..., Engine] = Engine.open, on_stage: Stage = lambda text: None
) -> Report:
    """Decide, and measure what bounds it: all in one run, for another one's machine may be a busier one.

    Raises: Refused, EngineError, OSError.
    """
    if plan.drop_caches:
        drop_caches()
    runs, requests = _prepared(path, plan, open_engine)

    def opened(streaming: Streaming | None) -> Engine:
        on_stage(f"opening {path.name}")
        return open_engine(
            path,
            streaming=streaming,
            repack=plan.repack,
            n_threads=plan.n_threads,
            n_ubatch=plan.n_ubatch,
            n_ctx=plan.n_ctx,
        )

    probes = _probes(requests, plan, on_stage)
    with _AnonymousPeak() as peak:
        info, made, floors = _all_decided(runs, plan, opened, on_stage)
    cgroup_bytes, cgroup_limit_bytes = cgroup_memory()
    probes += _probes(requests, plan, on_stage)
    if plan.streaming is not None and info.is_streamed:
        # Without guesses, so that a prompt's experts and no others come to memory; auto, for what it has room for.
        with opened(replace(plan.streaming, cache_bytes=-1, look_ahead=False)) as engine:
            floors = list(_streamed_floors(engine, made, on_stage))
    bandwidth = max((one.bytes_per_s for one in probes), default=math.inf)
    return Report(
        info=info,
        plan=plan,
        probes=tuple(probes),
        decisions=tuple(_decision(one, floor, bandwidth) for one, floor in zip(made, floors, strict=True)),
        memory=Memory(anonymous_bytes=peak.n_bytes, cgroup_bytes=cgroup_bytes, cgroup_limit_bytes=cgroup_limit_bytes),
    )


def _prepared(
    path: Path, plan: Plan, open_engine: Callable[..., Engine]
) -> tuple[list[list[_Prompt]], list["Request"]]:
    """The prompts of each run, and what may be read of experts: nothing where nothing streams.

    Raises: Refused, EngineError.
    """
    with open_engine(path, inspect=True) as engine:
        streams = plan.streaming is not None and engine.info.experts_bytes > 0
        requests = expert_requests(shards(path, engine.info.n_shards)) if streams else []
        return list(_runs(engine, plan)), requests


def _probes(requests: Sequence["Request"], plan: Plan, on_stage: Stage) -> list[Probe]:
    if plan.streaming is None or not requests:
        return []
    on_stage("reading experts at random")
    n_threads = plan.streaming.io_threads or DEFAULT_IO_THREADS
    return [probe(requests, n_threads=n_threads, direct=plan.streaming.direct, for_s=plan.probe_s)]


def _all_decided(
    runs: Sequence[Sequence[_Prompt]], plan: Plan, opened: Callable[[Streaming | None], Engine], on_stage: Stage
) -> tuple[Info, list[_Made], list[Floor]]:
    """The floors are those of a model that does not stream, which has everything in memory as it is."""
    infos: list[Info] = []
    made: list[_Made] = []
    floors: list[Floor] = []
    for prompts in runs:
        if plan.drop_caches:
            drop_caches()
        began = time.perf_counter()
        with opened(plan.streaming) as engine:
            open_s = time.perf_counter() - began
            infos.append(engine.info)
            made += _decided(engine, prompts, open_s, on_stage)
            if not engine.info.is_streamed:
                floors += [_floor(engine, one, on_stage) for one in made[-len(prompts) :]]
    return infos[0], made, floors


def _decision(made: _Made, floor: Floor, bytes_per_s: float) -> Decision:
    spent = made.spent
    n_asked = spent.n_hits + spent.n_misses
    missing = spent.routed_bytes * spent.n_misses / n_asked if n_asked else 0.0
    return Decision(
        name=made.prompt.name,
        is_cold=made.is_cold,
        open_s=made.open_s,
        cache_bytes=made.cache_bytes,
        wall_s=made.wall_s,
        spent=spent,
        missing_bytes=missing,
        io_floor_s=missing / bytes_per_s if missing else 0.0,
        compute_floor=floor,
    )


def _decided(engine: Engine, prompts: Sequence[_Prompt], open_s: float, on_stage: Stage) -> Iterator[_Made]:
    for index, prompt in enumerate(prompts):
        if len(prompt.tokens) > engine.n_ctx:
            raise Refused(f"{prompt.name} has {len(prompt.tokens)} tokens, and the context room for {engine.n_ctx}")
        on_stage(f"deciding: {prompt.name}")
        wall_s, spent = _timed(engine, prompt.tokens)
        yield _Made(prompt, index == 0, open_s, engine.info.cache_bytes, wall_s, spent)


def _timed(engine: Engine, tokens: Sequence[int]) -> tuple[float, PrefillResult]:
    began = time.perf_counter()
    engine.drop_state()
    spent = engine.prefill(tokens)
    engine.logits()
    return time.perf_counter() - began, spent


def _streamed_floors(engine: Engine, made: Sequence[_Made], on_stage: Stage) -> Iterator[Floor]:
    """The floor of each decision whose experts fit in memory together, and an estimate of the others'."""
    room = engine.info.cache_bytes
    for one in made:
        if one.spent.routed_bytes > room:
            yield _estimated(engine, one, "its experts do not fit in memory together")
            continue
        engine.set_cache(0)
        engine.set_cache(engine.info.streamed_bytes)
        on_stage(f"reading its experts: {one.prompt.name}")
        _timed(engine, one.prompt.tokens)
        yield _floor(engine, one, on_stage)


def _floor(engine: Engine, made: _Made, on_stage: Stage) -> Floor:
    """The fastest of a few runs of a prompt that was computed before, so that everything is in memory."""
    on_stage(f"computing it from memory: {made.prompt.name}")
    runs = [_timed(engine, made.prompt.tokens) for _ in range(FLOOR_RUNS)]
    wall_s, spent = min(runs, key=lambda run: run[0])
    if spent.n_misses or spent.n_major_faults:
        return _estimated(engine, made, "weights went out of memory again")
    return Floor(s=wall_s)


def _estimated(engine: Engine, made: _Made, reason: str) -> Floor:
    """CPU seconds hold no waiting. Wall less stalls would hold what no one counted as one, and praise the decision."""
    return Floor(s=made.spent.prefill_cpu_s / engine.info.n_threads, estimated_because=reason)


# The prompts.


def _runs(engine: Engine, plan: Plan) -> Iterator[list[_Prompt]]:
    if plan.texts:
        yield [_Prompt(name, _text_tokens(engine, name, text, plan.template)) for name, text in plan.texts]
    for length in plan.lengths:
        yield [_Prompt(f"{length}/{number}", made_tokens(engine, length, number)) for number in range(plan.repeat)]


def _text_tokens(engine: Engine, name: str, text: str, template: bool) -> list[int]:
    templated = template and engine.info.has_template
    tokens = engine.chat_tokens([("user", text)]) if templated else engine.text_tokens(text, add_bos=True)
    if not tokens:
        raise Refused(f"{name} holds no text")
    return tokens


def made_tokens(engine: Engine, length: int, number: int) -> list[int]:
    """The first `length` tokens of a made-up screen. Screens are alike as those of one app are, and none is another."""
    draw = random.Random(f"{length}/{number}")
    text = "These elements are on the screen of the app. Which of them should be pressed next?\n"
    while len(tokens := engine.text_tokens(text, add_bos=True)) < length:
        for _ in range(1 + length // 10):
            kind = draw.choice(("button", "switch", "text field", "list item", "tab", "link", "icon"))
            verb = draw.choice(("Add", "Open", "Close", "Share", "Edit", "Save", "Remove", "Search", "Select", "Show"))
            thing = draw.choice(("account", "network", "message", "photo", "address", "order", "date", "note", "sound"))
            state = draw.choice(("enabled", "disabled", "checked", "hidden"))
            text += f"{kind} '{verb} {thing}' at {draw.randrange(1080)}, {draw.randrange(2400)}: {state}\n"
    return tokens[:length]


# Where the experts lie.


@dataclass(frozen=True, slots=True)
class Request:
    """A range of a file that the engine reads at once."""

    path: Path
    offset: int
    n_bytes: int


def shards(path: Path, n_shards: int) -> list[Path]:
    """All files of a model, by the name of its first."""
    if n_shards < 2 or not _SHARD.search(path.name):
        return [path]
    return [
        path.with_name(_SHARD.sub(f"-{number:05}-of-{n_shards:05}.gguf", path.name))
        for number in range(1, n_shards + 1)
    ]


def expert_requests(paths: Sequence[Path]) -> list[Request]:
    """One for each expert's part of each tensor, or more where that is larger than a request."""
    found = []
    for path in paths:
        for offset, n_bytes, n_expert in _expert_tensors(path):
            part = n_bytes // n_expert
            for at in range(offset, offset + part * n_expert, part):
                for skipped in range(0, part, MAX_REQUEST_BYTES):
                    found.append(Request(path, at + skipped, min(MAX_REQUEST_BYTES, part - skipped)))
    return found


def _expert_tensors(path: Path) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, experts) of each tensor of routed experts. The engine has opened the file: it is a sound one.

    Source: the GGUF specification, docs/gguf.md of ggml.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = 8

        def number(layout: str) -> int:
            nonlocal at
            value: int = struct.unpack_from(f"<{layout}", data, at)[0]
            at += struct.calcsize(layout)
            return value

        def text() -> bytes:
            nonlocal at
            size = number("Q")
            at += size
            return data[at - size : at]

        def skip(kind: int, count: int = 1) -> None:
            nonlocal at
            if kind == _ARRAY:
                skip(number("I"), number("Q"))
            elif kind == _STRING:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", data, at)[0]
            else:
                at += count * _VALUE_BYTES[kind]

        n_tensors, n_values = number("Q"), number("Q")
        alignment = 32
        for _ in range(n_values):
            key, kind = text(), number("I")
            if key == b"general.alignment" and kind == _UINT32:
                alignment = number("I")
            else:
                skip(kind)
        tensors = []
        for _ in range(n_tensors):
            name = text()
            sizes = [number("Q") for _ in range(number("I"))]
            number("I")
            tensors.append((number("Q"), name, sizes))
        begin = -(-at // alignment) * alignment
        ends = [*sorted(offset for offset, _, _ in tensors)[1:], len(data) - begin]
        for (offset, name, sizes), end in zip(sorted(tensors), ends, strict=True):
            if _EXPERTS.fullmatch(name):
                yield begin + offset, end - offset, sizes[2]


# What the machine does by itself.


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


def drop_caches(file: Path = DROP_CACHES) -> None:
    """Have the system forget what it has read of files.

    Raises: Refused, for who may not.
    """
    os.sync()
    try:
        file.write_text("3\n")
    except OSError as error:
        raise Refused(
            f"--drop-caches: only root may empty the page cache, and here it is refused ({error.strerror}). "
            "Leave it out: reads of experts go past the page cache"
        ) from error


class _AnonymousPeak:
    """Most anonymous memory of this process at any sample, in a `with`."""

    def __init__(self) -> None:
        self.n_bytes = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "_AnonymousPeak":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while self.n_bytes is not None and not self._over.wait(SAMPLE_EVERY_S):
            self.n_bytes = max(self.n_bytes, _anonymous_bytes() or 0)


def _anonymous_bytes() -> int | None:
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
