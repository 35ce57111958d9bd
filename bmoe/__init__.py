"""Decisions from one prefill: which of these choices would the model say next?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmoe.decide import BadLogits, DecideRequest, DecideResult, Refused
    from bmoe.fetching import FetchError
    from bmoe.generate import GenerateRequest, GenerateResult, Sampling, Step
    from bmoe.session import Session

__all__ = [
    "BadLogits",
    "DecideRequest",
    "DecideResult",
    "FetchError",
    "GenerateRequest",
    "GenerateResult",
    "Refused",
    "Sampling",
    "Session",
    "Step",
]

_HOMES = {"FetchError": "bmoe.fetching", "Session": "bmoe.session"} | dict.fromkeys(
    ("GenerateRequest", "GenerateResult", "Sampling", "Step"), "bmoe.generate"
)


def __getattr__(name: str) -> Any:
    # On first use: the command has to be past this line before an interrupt can be answered in a sentence.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "bmoe.decide")), name)
