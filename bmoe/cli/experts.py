"""How routed experts are streamed: the flags, what they come to, and what is said of it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from bmoe.decide import Refused
from bmoe_native.types import DEFAULT_IO_THREADS, Info, Streaming

MIB = 2**20
MAX_CACHE_MIB = 2**31 - 1
PREFETCH = ("off", "previous", "router", "both")
DENSE = ("mmap", "anon")

MoeStreamFlag = Annotated[
    bool, typer.Option("--moe-stream", help="Experts stay in the file; read those a prompt routes to.")
]
CacheMbFlag = Annotated[
    str | None, typer.Option("--cache-mb", metavar="N|auto", help="MiB of experts kept in memory; 0: none. [auto]")
]
IoThreadsFlag = Annotated[
    int | None, typer.Option("--io-threads", metavar="N", min=0, max=64, help="That read experts; 0: 4.")
]
NoOdirectFlag = Annotated[bool, typer.Option("--no-odirect", help="Read experts through the page cache.")]
PrefetchFlag = Annotated[
    str | None,
    typer.Option("--prefetch", metavar="off|previous|router|both", help="Read ahead, going by what. [both]"),
]
DenseWeightsFlag = Annotated[
    str | None,
    typer.Option("--dense-weights", metavar="mmap|anon", help="The rest: page cache, or read once into memory. [mmap]"),
]
NoRepackFlag = Annotated[bool, typer.Option("--no-repack", help="Compute with weights as they lie in the file.")]
NExpertUsedFlag = Annotated[
    int, typer.Option("--n-expert-used", metavar="N", min=0, help="Experts per token; 0: as the file says.")
]
RouteTraceFlag = Annotated[
    Path | None, typer.Option("--route-trace", metavar="FILE", help="Append a row per token and expert, as CSV.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFlags:
    """What was typed; None and False where nothing was.

    Raises: Refused, for a value that means nothing.
    """

    moe_stream: MoeStreamFlag = False
    cache_mb: CacheMbFlag = None
    io_threads: IoThreadsFlag = None
    no_odirect: NoOdirectFlag = False
    prefetch: PrefetchFlag = None
    dense_weights: DenseWeightsFlag = None
    no_repack: NoRepackFlag = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("--prefetch", self.prefetch, PREFETCH),
            ("--dense-weights", self.dense_weights, DENSE),
        ):
            if value is not None and value not in allowed:
                raise Refused(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        if not self.is_auto and not (self._cache_mib.isdecimal() and int(self._cache_mib) <= MAX_CACHE_MIB):
            raise Refused(
                f"--cache-mb must be auto or a whole number of MiB from 0 to {MAX_CACHE_MIB}, not {self.cache_mb!r}"
            )

    @property
    def is_auto(self) -> bool:
        return self.cache_mb is None or self.cache_mb == "auto"

    @property
    def _cache_mib(self) -> str:
        text = self.cache_mb or ""
        return text if text.isascii() and len(text) <= len(str(MAX_CACHE_MIB)) else ""

    @property
    def streaming(self) -> Streaming | None:
        if not self.moe_stream:
            return None
        return Streaming(
            cache_bytes=-1 if self.is_auto else int(self._cache_mib) * MIB,
            io_threads=self.io_threads or 0,
            direct=not self.no_odirect,
            prefetch=self.prefetch or "both",
            dense=self.dense_weights or "mmap",
        )

    @property
    def repack(self) -> bool:
        return not self.no_repack

    @property
    def repacked(self) -> str:
        """Which weights are computed with in another layout than the file's, for that decides the last bits."""
        return "none" if self.no_repack else "dense" if self.moe_stream else "all"

    @property
    def without_effect(self) -> str:
        """What is to be said of flags that do nothing; empty where there are none."""
        needs_stream = [field for field in fields(self) if field.name not in ("moe_stream", "no_repack")]
        typed = [_flag(field.name) for field in needs_stream if getattr(self, field.name) not in (None, False)]
        if self.moe_stream or not typed:
            return ""
        return f"{' and '.join(typed)} {'does' if len(typed) == 1 else 'do'} nothing without --moe-stream"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def opened(info: Info, flags: ExpertFlags, *, in_detail: bool) -> Iterator[str]:
    """What is to be said of a model that was opened with these flags."""
    if not info.is_streamed:
        if flags.moe_stream:
            yield "this model has no routed experts: nothing is streamed, all of it is in memory"
        return
    if not info.reads_direct and not flags.no_odirect:
        yield "the file system refuses direct reads: experts are read through the page cache, which changes no answer"
    if flags.is_auto and info.cache_bytes == 0:
        yield "too little memory is available to keep experts in: each prompt reads its own anew (--cache-mb)"
    if in_detail:
        yield described(info, flags)


def described(info: Info, flags: ExpertFlags) -> str:
    """What streams, and what the budget came to."""
    chosen = ", chosen from what is available" if flags.is_auto else ""
    room = "room for all of them" if info.cache_bytes >= info.streamed_bytes else "cache"
    n_threads = flags.io_threads or DEFAULT_IO_THREADS
    return (
        f"{info.streamed_bytes // MIB} MiB of experts in {info.n_moe_layer} layers are streamed; "
        f"{room}: {info.cache_bytes // MIB} MiB{chosen}; "
        f"{'direct' if info.reads_direct else 'buffered'} reads by {n_threads} thread{'s' if n_threads > 1 else ''}"
    )
