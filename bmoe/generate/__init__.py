"""What generating is: sampling, stopping, a history that is re-rendered; over token ids, free of any engine."""

from bmoe.generate.backend import GenerateBackend, TurnPrompt
from bmoe.generate.generator import Generator
from bmoe.generate.types import Ending, GenerateRequest, GenerateResult, Sampling, Step

__all__ = [
    "Ending",
    "GenerateBackend",
    "GenerateRequest",
    "GenerateResult",
    "Generator",
    "Sampling",
    "Step",
    "TurnPrompt",
]
