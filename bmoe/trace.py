"""What requests cost, row by row, into a CSV file.

Source: the columns are documented in docs/telemetry.md and tested against it.
"""

import csv
import fcntl
import io
import math
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from bmoe.decide import DecideRequest, DecideResult, Refused
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
)
_MB_IN_A_MIB = 2**20 / 1e6


class CsvTrace:
    """A row per decision and per generated token, appended whole: a killed process leaves no half of a row."""

    def __init__(self, path: Path, *, note: Callable[[str], None] = lambda text: None) -> None:
        """Open for appending; a torn last line, as a full disk leaves it, is cut off.

        Raises: Refused, where the file cannot be written or holds something else.
        """
        self._note = note
        self._path = path
        self._seq = 0
        self._descriptor: int | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Refused(f"--csv: cannot write {path}: {error.strerror}") from error
        try:
            is_new = _is_new(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        if is_new:
            self._write(_row(COLUMNS))

    def close(self) -> None:
        """Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

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
        self._write(_row([values.get(column, "") for column in COLUMNS]))

    def _write(self, row: bytes) -> None:
        """One call a row, so that nothing can come between; what cannot be written ends the trace, not the session."""
        if self._descriptor is None:
            return
        try:
            if os.write(self._descriptor, row) == len(row):
                return
            reason = "only a part of a row was written"
        except OSError as error:
            reason = error.strerror or str(error)
        self.close()
        self._note(f"--csv: {self._path} ends here: {reason}")


def _prefill(result: DecideResult | GenerateResult) -> dict[str, float]:
    times = _times(
        result.prefill_s,
        result.prefill_cpu_s,
        io_s=result.prefill_io_s,
        mgmt_s=result.prefill_mgmt_s,
        stall_s=result.prefill_stall_s,
    )
    return {**times, "read_mb": result.prefill_read_mib * _MB_IN_A_MIB}


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


def _row(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("ascii")


def _is_new(descriptor: int, path: Path) -> bool:
    """Whether a header is to be written; one that is there must be ours.

    Raises: Refused.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"--csv: another process is writing {path}") from error
    header = _row(COLUMNS)
    size = os.fstat(descriptor).st_size
    found = os.pread(descriptor, len(header), 0)
    if header.startswith(found) and found != header:  # empty, or a header that was cut off
        os.ftruncate(descriptor, 0)
        return True
    if found != header:
        raise Refused(f"--csv: {path} holds something else: give another file")
    os.ftruncate(descriptor, _end_of_last_line(descriptor, size))
    return False


def _end_of_last_line(descriptor: int, size: int) -> int:
    """Rows are short: the last line end is in the last few KiB, or the header's is the one."""
    start = max(0, size - 2**16)
    return start + os.pread(descriptor, size - start, start).rfind(b"\n") + 1
