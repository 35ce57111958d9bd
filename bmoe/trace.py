"""What requests cost, row by row, into a CSV file.

Source: the columns are documented in docs/telemetry.md and tested against it.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from bmoe.csv_file import CsvFile, row
from bmoe.decide import DecideRequest, DecideResult
from bmoe.generate import GenerateRequest, GenerateResult, Step

COLUMNS = (
    "seq",
    "id",
    "kind",
    "step",
    "steps",
    "wall_ms",
    "cpu_ms",
    "io_ms",
    "compute_ms",
    "mgmt_ms",
    "stall_ms",
    "read_mb",
    "cache_hit_pct",
    "majflt",
    "n_tokens",
    "n_reused",
    "n_prefilled",
    "restore_ms",
    "store_ms",
    "policy_ms",
    "best",
    "best_logp",
    "outside_mass",
    "cancelled",
    "dev_tokens",
    "dev_read_mb",
    "dev_stall_ms",
    "dev_routed",
    "dev_demand",
    "dev_nodes",
)
_MB_IN_A_MIB = 2**20 / 1e6


class CsvTrace:
    """A row per decision and per generated token, appended whole: a killed process leaves no half of a row.

    Raises: Refused, where the file cannot be written or holds something else.
    """

    def __init__(self, path: Path, *, note: Callable[[str], None] = lambda text: None) -> None:
        self._seq = 0
        self._file = CsvFile(path, COLUMNS, flag="--csv", note=note)

    def close(self) -> None:
        """Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> "CsvTrace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def began(self, request_id: str, request: DecideRequest | GenerateRequest) -> None:
        self._seq += 1

    def stepped(self, request_id: str, step: Step) -> None:
        self._add(
            request_id,
            kind="token",
            step=step.step,
            steps=step.steps,
            **_times(step.wall_s, step.cpu_s, io_s=step.io_s, mgmt_s=step.mgmt_s, stall_s=step.stall_s),
            read_mb=step.read_bytes / 1e6,
            cache_hit_pct=step.cache_hit_pct,
            majflt=step.n_major_faults,
        )

    def decided(self, request_id: str, result: DecideResult) -> None:
        self._add(
            request_id,
            kind="decision",
            **_prefill(result),
            cache_hit_pct=result.cache_hit_pct,
            n_tokens=result.n_tokens,
            n_reused=result.n_reused,
            n_prefilled=result.n_prefilled,
            restore_ms=1000 * result.restore_s,
            store_ms=1000 * result.store_s,
            policy_ms=1000 * result.policy_s,
            best=result.best,
            best_logp=_best_logp(result),
            outside_mass=result.outside_mass,
            cancelled=int(result.cancelled),
        )

    def done(self, request_id: str, result: GenerateResult) -> None:
        self._add(
            request_id,
            kind="prompt",
            **_prefill(result),
            cache_hit_pct=result.prefill_cache_hit_pct,
            n_tokens=result.n_prompt + result.n_reused,
            n_reused=result.n_reused,
            n_prefilled=result.n_prompt,
            cancelled=int(result.cancelled),
        )

    def failed(self, request_id: str, message: str) -> None:
        """Refusals cost nothing and have no row."""

    def _add(self, request_id: str, **cells: object) -> None:
        values = {"seq": self._seq, "id": request_id, **cells}
        self._file.append(row([values.get(column, "") for column in COLUMNS]))


def _prefill(result: DecideResult | GenerateResult) -> dict[str, float]:
    times = _times(
        result.prefill_s,
        result.prefill_cpu_s,
        io_s=result.prefill_io_s,
        mgmt_s=result.prefill_mgmt_s,
        stall_s=result.prefill_stall_s,
    )
    return {
        **times,
        "read_mb": result.prefill_read_mib * _MB_IN_A_MIB,
        "dev_tokens": result.prefill_dev_tokens,
        "dev_read_mb": result.prefill_dev_read_mib * _MB_IN_A_MIB,
        "dev_stall_ms": 1000 * result.prefill_dev_stall_s,
        "dev_routed": result.prefill_dev_routed,
        "dev_demand": result.prefill_dev_demand,
        "dev_nodes": result.prefill_dev_nodes,
    }


def _times(wall_s: float, cpu_s: float, *, io_s: float, mgmt_s: float, stall_s: float) -> dict[str, float]:
    return {
        "wall_ms": 1000 * wall_s,
        "cpu_ms": 1000 * cpu_s,
        "io_ms": 1000 * io_s,
        "compute_ms": 1000 * max(wall_s - stall_s - mgmt_s, 0.0),
        "mgmt_ms": 1000 * mgmt_s,
        "stall_ms": 1000 * stall_s,
    }


def _best_logp(result: DecideResult) -> object:
    best = math.nan if result.cancelled else result.choice_logp[result.best]
    return best if math.isfinite(best) else ""
