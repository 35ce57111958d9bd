"""Which experts each token was routed to, row by row, into a CSV file.

Source: the columns are documented in docs/telemetry.md and tested against it.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from bmoe.csv_file import CsvFile
from bmoe_native.types import RESIDENCY, Routing

COLUMNS = ("phase", "step", "layer", "slot", "expert", "weight", "residency", "bytes", "seq", "token")
_NONE_YET = 2**31  # above any layer: the next one begins a graph


class RouteTrace:
    """A row for each token and expert of a layer, a layer's rows in one piece. Given to Session.open().

    Raises: Refused, where the file cannot be written or holds something else.
    """

    def __init__(self, path: Path, *, note: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.next_seq = 1  # of the next request; set by who also counts those that never reach a session
        self._seq = 0
        self._phase = "prefill"
        self._step = -1  # the graph's number
        self._layer = _NONE_YET
        self._n_tokens = 0  # of the graph
        self._file = CsvFile(path, COLUMNS, flag="--route-trace", note=note)

    def close(self) -> None:
        """Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> "RouteTrace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def began(self) -> None:
        """A request is served from here on."""
        self._seq = self.next_seq
        self.next_seq += 1
        self._enter("prefill")

    def sampled(self) -> None:
        """The request has a token: graphs from here on are its decoding."""
        if self._phase == "prefill":
            self._enter("decode")

    def routed(self, routing: Routing) -> None:
        """A layer's choices."""
        n_tokens, n_used = routing.experts.shape
        if routing.layer <= self._layer:
            self._step += 1
            self._n_tokens = n_tokens
        self._layer = routing.layer
        if not self._file.is_open:
            return
        experts = routing.experts.ravel()
        n_bytes = np.zeros(experts.size, np.int64)
        n_bytes[np.unique(experts, return_index=True)[1]] = routing.expert_bytes
        # The last layer may have fewer tokens than those before it: those whose logits are wanted, which come last.
        first = max(self._n_tokens - n_tokens, 0)
        cells = zip(
            np.tile(np.arange(n_used), n_tokens).tolist(),
            experts.tolist(),
            routing.weights.ravel().tolist(),
            _residency(routing),
            n_bytes.tolist(),
            np.repeat(np.arange(first, first + n_tokens), n_used).tolist(),
            strict=True,
        )
        # 9 digits read back as the same float32.
        line = f"{self._phase},{self._step},{routing.layer},%d,%d,%.9g,%s,%d,{self._seq},%d\n"
        self._file.append("".join([line % row for row in cells]).encode("ascii"))

    def _enter(self, phase: str) -> None:
        self._phase, self._step, self._layer = phase, -1, _NONE_YET


def _residency(routing: Routing) -> list[str]:
    if routing.residency is None:
        return ["resident"] * routing.experts.size
    return [RESIDENCY[code] for code in routing.residency.ravel().tolist()]
