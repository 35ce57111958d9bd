"""What a decision is: rules over token ids and a row of logits, free of any engine."""

from bmoe.decide.decider import Decider
from bmoe.decide.prefix import KeptPrefix
from bmoe.decide.score import BadLogits
from bmoe.decide.types import DecideRequest, DecideResult, Refused

__all__ = ["BadLogits", "DecideRequest", "DecideResult", "Decider", "KeptPrefix", "Refused"]
