"""Decisions from one prefill: which of these choices would the model say next?"""

from bmoe.decide import BadLogits, DecideRequest, DecideResult, Refused
from bmoe.fetching import FetchError
from bmoe.session import Session

__all__ = ["BadLogits", "DecideRequest", "DecideResult", "FetchError", "Refused", "Session"]
