"""The few calls that generating needs of whatever computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bmoe.decide.backend import ChatMessage, PrefillOutcome
from bmoe.generate.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPrompt:
    """A rendered conversation as tokens, up to where the answer begins."""

    tokens: Sequence[int]
    in_reasoning: bool  # the prompt ends with reasoning opened


class DecodeOutcome(PrefillOutcome, Protocol):
    """A prefill with what generating reports of it besides."""

    @property
    def n_major_faults(self) -> int: ...


class GenerateBackend(Protocol):
    """One model with one sequence state; the rules of `bmoe.decide.backend.Backend` hold."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def position(self) -> int:
        """Tokens the state holds."""
        ...

    @property
    def reasoning_tags(self) -> tuple[str, str]:
        """What stands before reasoning and after it; empty where unknown."""
        ...

    @property
    def cache_resident_mib(self) -> float:
        """Streamed experts that are in memory; 0 where nothing streams, like the next."""
        ...

    @property
    def cache_budget_mib(self) -> float:
        """And what may be, from one graph to the next."""
        ...

    def turn_prompt(self, messages: Sequence[ChatMessage], *, think: bool) -> TurnPrompt:
        """The chat template over messages. Raises: Refused."""
        ...

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, those of a control token as its text."""
        ...

    def is_control(self, token: int) -> bool: ...
    def ends_turn(self, token: int) -> bool:
        """Whether the token ends what is generated."""
        ...

    def prefill(self, tokens: Sequence[int]) -> DecodeOutcome: ...
    def start_sampling(self, sampling: Sampling) -> None: ...
    def sample(self) -> int:
        """A token drawn from the last logits. Raises: BadLogits."""
        ...

    def drop_state(self) -> None: ...
    def cut_state(self, n_tokens: int) -> bool:
        """Cut the state to its first tokens; False, and nothing changed, where the memory cannot be cut."""
        ...
