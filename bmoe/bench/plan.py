"""What is to be measured."""

from collections.abc import Callable
from dataclasses import dataclass

from bmoe.decide import Refused
from bmoe_native import Engine
from bmoe_native.types import Streaming

Stage = Callable[[str], None]  # told what is being done
OpenEngine = Callable[..., Engine]
PROBE_S = 2.0


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
    stock: bool = False  # compare with the stock way, `repeat` processes of each
    streaming: Streaming | None = None  # does nothing to a model without routed experts
    repack: bool = True
    n_threads: int = 0
    n_ubatch: int = 0
    n_ctx: int = 0
    n_expert_used: int = 0  # per token; 0: as the file says
    drop_caches: bool = False
    probe_s: float = PROBE_S

    def __post_init__(self) -> None:
        if bool(self.lengths) == bool(self.texts):
            raise Refused("give lengths or texts of prompts, one of them")
        if any(length < 1 for length in self.lengths) or self.repeat < 1:
            raise Refused("a prompt has at least one token, and a run at least one prompt")
        if self.stock and self.streaming is None:
            raise Refused("what streams is compared with the stock way: without streaming there is nothing to compare")
        if self.stock and len(self.texts) % 2:
            raise Refused("texts are compared in pairs: what is answered first, and what is after it")

    @property
    def engine_options(self) -> dict[str, int]:
        """What every engine is opened with, however its weights are held."""
        return {
            "n_threads": self.n_threads,
            "n_ubatch": self.n_ubatch,
            "n_ctx": self.n_ctx,
            "n_expert_used": self.n_expert_used,
        }
