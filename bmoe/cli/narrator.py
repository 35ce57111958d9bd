"""What a session serves, in prose."""

import json
import math
import time
from collections.abc import Callable

from bmoe.decide import DecideRequest, DecideResult
from bmoe.generate import GenerateRequest, GenerateResult, Step

EVERY_S = 1.0


class Narrator:
    """A line per request and, while a long one generates, one a second."""

    def __init__(self, note: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._note = note
        self._clock = clock
        self._next = 0.0

    def began(self, request_id: str, request: DecideRequest | GenerateRequest) -> None:
        self._next = self._clock() + EVERY_S

    def stepped(self, request_id: str, step: Step) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + EVERY_S
            self._note(f"generate {request_id}: token {step.step} of {step.steps}")

    def decided(self, request_id: str, result: DecideResult) -> None:
        cost = f"{result.n_prefilled} of {result.n_tokens} tokens computed in {result.prefill_s:.2f} s"
        if result.cancelled:
            self._note(f"decide {request_id}: cancelled")
            return
        share = 100 * math.exp(result.choice_logp[result.best])
        self._note(f"decide {request_id}: {json.dumps(result.choices[result.best])} with {share:.1f} %, {cost}")

    def done(self, request_id: str, result: GenerateResult) -> None:
        prompt = f"{result.n_prompt} tokens of prompt in {result.prefill_s:.2f} s"
        answer = f"{result.n_generated} generated in {result.generate_s:.2f} s"
        self._note(f"generate {request_id}: {prompt}, {answer}, ended by {result.ending}")

    def failed(self, request_id: str, message: str) -> None:
        self._note(f"request {request_id}: {message}")
