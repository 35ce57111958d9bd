"""What was measured."""

from dataclasses import dataclass
from statistics import median

from bmoe.bench.bandwidth import Probe
from bmoe.bench.memory import Bound
from bmoe.bench.plan import Plan
from bmoe.bench.stock import Stock
from bmoe_native import PrefillResult
from bmoe_native.types import Info


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
    peak_anonymous_bytes: int | None  # of the process, sampled meanwhile; None where the system does not tell
    anonymous_before_bytes: int | None  # before the engine was opened, and part of the peak
    bound: Bound | None  # of what the engine has of the peak; None where it did not tell
    missing_bytes: float  # of experts that were routed to and not in memory
    io_floor_s: float
    compute_floor: Floor

    @property
    def floor_s(self) -> float:
        """What it cannot be faster than, however well reading and computing go on side by side."""
        return max(self.io_floor_s, self.compute_floor.s)

    @property
    def anonymous_ratio(self) -> float | None:
        """Peak of anonymous memory to its bound."""
        if self.peak_anonymous_bytes is None or self.bound is None:
            return None
        return self.peak_anonymous_bytes / self.bound.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """One prompt, again and again, with all of its experts kept in memory and with the whole model in memory."""

    name: str
    streamed_s: tuple[float, ...] = ()  # in turn with the next
    resident_s: tuple[float, ...] = ()
    unmeasured_because: str = ""

    @property
    def ratio(self) -> float | None:
        """Streamed to resident, of medians."""
        if self.unmeasured_because:
            return None
        return median(self.streamed_s) / median(self.resident_s)


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
    cached: tuple[Cached, ...] = ()  # of each run; none where nothing streams
    stock: Stock | None = None  # where the plan asks for it

    @property
    def bytes_per_s(self) -> float | None:
        """The better probe's: what the other one gives would be no floor."""
        return max((probe.bytes_per_s for probe in self.probes), default=None)
