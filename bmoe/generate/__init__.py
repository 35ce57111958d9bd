"""What generating is: sampling, stopping, a history that is re-rendered; over token ids, free of any engine."""

from bmoe.generate.types import GenerateRequest, GenerateResult, Sampling, Step

__all__ = ["GenerateRequest", "GenerateResult", "Sampling", "Step"]
