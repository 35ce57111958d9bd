"""The few calls a decision needs of whatever computes it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
State = bytes | bytearray
ChatMessage = tuple[str, str]
"""(role, content); role is "system", "user" or "assistant"."""


class PrefillOutcome(Protocol):
    """What one prefill did and cost."""

    @property
    def cancelled(self) -> bool: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def prefill_cpu_s(self) -> float: ...

    # Of streamed experts, as the counters of bmoe.h say; 0 where nothing streams.
    @property
    def read_bytes(self) -> int: ...
    @property
    def routed_bytes(self) -> int: ...
    @property
    def ahead_bytes(self) -> int: ...
    @property
    def wasted_bytes(self) -> int: ...
    @property
    def n_hits(self) -> int: ...
    @property
    def n_misses(self) -> int: ...
    @property
    def io_s(self) -> float: ...
    @property
    def stall_s(self) -> float: ...
    @property
    def mgmt_s(self) -> float: ...

    # Of the part that a prefill device computed; 0 without one.
    @property
    def dev_tokens(self) -> int: ...
    @property
    def dev_read_bytes(self) -> int: ...
    @property
    def dev_stall_s(self) -> float: ...
    @property
    def dev_routed(self) -> int: ...
    @property
    def dev_demand(self) -> int: ...
    @property
    def dev_nodes(self) -> int: ...


class Backend(Protocol):
    """One model with one sequence state.

    Text handed in is data: no control token comes from it. A call that fails raises; a failure is fatal for
    the session unless it is `Refused`.
    """

    @property
    def n_ctx(self) -> int:
        """Tokens the context has room for."""
        ...

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The chat template over messages, reasoning off, up to where the answer begins.

        Raises: Refused, when there is no template or it refuses the messages.
        """
        ...

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        """Text as data; with add_bos led by BOS where the model wants one."""
        ...

    def token_text(self, token: int) -> str:
        """The text of one token, for messages to people."""
        ...

    def prefill(self, tokens: Sequence[int]) -> PrefillOutcome:
        """Compute tokens (at least one) after the current position."""
        ...

    def logits(self) -> Float32Array:
        """Logits of the last prefilled token: float32 [n_vocab], a copy."""
        ...

    def save_state(self) -> State:
        """The whole state at the current position."""
        ...

    def load_state(self, state: State) -> None:
        """Replace the state by a saved one."""
        ...

    def drop_state(self) -> None:
        """Empty the state."""
        ...
