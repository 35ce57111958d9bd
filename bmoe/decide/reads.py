"""What prefills read of streamed experts, and what a prefill device had of them."""

from dataclasses import dataclass
from typing import Any

from bmoe.decide.backend import PrefillOutcome
from bmoe.decide.prefix import MIB


@dataclass(slots=True, kw_only=True)
class Reads:
    """The reads of several prefills, added up; all 0 where nothing streams and no device computes."""

    read_bytes: int = 0
    routed_bytes: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0
    n_hits: int = 0
    n_misses: int = 0
    io_s: float = 0.0
    stall_s: float = 0.0
    mgmt_s: float = 0.0
    dev_tokens: int = 0
    dev_read_bytes: int = 0
    dev_stall_s: float = 0.0
    dev_routed: int = 0
    dev_demand: int = 0
    dev_nodes: int = 0

    def add(self, outcome: PrefillOutcome) -> None:
        self.read_bytes += outcome.read_bytes
        self.routed_bytes += outcome.routed_bytes
        self.ahead_bytes += outcome.ahead_bytes
        self.wasted_bytes += outcome.wasted_bytes
        self.n_hits += outcome.n_hits
        self.n_misses += outcome.n_misses
        self.io_s += outcome.io_s
        self.stall_s += outcome.stall_s
        self.mgmt_s += outcome.mgmt_s
        self.dev_tokens += outcome.dev_tokens
        self.dev_read_bytes += outcome.dev_read_bytes
        self.dev_stall_s += outcome.dev_stall_s
        self.dev_routed += outcome.dev_routed
        self.dev_demand += outcome.dev_demand
        self.dev_nodes += outcome.dev_nodes

    @property
    def cache_hit_pct(self) -> float:
        """Of the experts that were asked for, those in memory; 0 where none was asked for."""
        n_asked = self.n_hits + self.n_misses
        return 100 * self.n_hits / n_asked if n_asked else 0.0

    def of_prefill(self) -> dict[str, Any]:
        """The fields of a result that tell of its prefill's reads, and of its device."""
        return {
            "prefill_read_mib": self.read_bytes / MIB,
            "prefill_io_s": self.io_s,
            "prefill_stall_s": self.stall_s,
            "prefill_mgmt_s": self.mgmt_s,
            "prefill_routed_mib": self.routed_bytes / MIB,
            "prefill_ahead_mib": self.ahead_bytes / MIB,
            "prefill_wasted_mib": self.wasted_bytes / MIB,
            "prefill_dev_tokens": self.dev_tokens,
            "prefill_dev_read_mib": self.dev_read_bytes / MIB,
            "prefill_dev_stall_s": self.dev_stall_s,
            "prefill_dev_routed": self.dev_routed,
            "prefill_dev_demand": self.dev_demand,
            "prefill_dev_nodes": self.dev_nodes,
        }
