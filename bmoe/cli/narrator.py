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
        cost += _on_device(result) + _read(result.prefill_read_mib, result.prefill_routed_mib, result.cache_hit_pct)
        if result.cancelled:
            self._note(f"decide {request_id}: cancelled")
            return
        share = 100 * math.exp(result.choice_logp[result.best])
        self._note(f"decide {request_id}: {json.dumps(result.choices[result.best])} with {share:.1f} %, {cost}")

    def done(self, request_id: str, result: GenerateResult) -> None:
        prompt = f"{result.n_prompt} tokens of prompt in {result.prefill_s:.2f} s"
        prompt += _on_device(result)
        prompt += _read(result.prefill_read_mib, result.prefill_routed_mib, result.prefill_cache_hit_pct)
        answer = f"{result.n_generated} generated in {result.generate_s:.2f} s"
        answer += _read(result.read_mib, result.routed_mib, result.cache_hit_pct)
        self._note(f"generate {request_id}: {prompt}, {answer}, ended by {result.ending}")

    def failed(self, request_id: str, message: str) -> None:
        self._note(f"request {request_id}: {message}")


def _on_device(result: DecideResult | GenerateResult) -> str:
    if not result.prefill_dev_tokens:
        return ""
    read = f", {result.prefill_dev_read_mib:.1f} MiB read for it" if result.prefill_dev_read_mib else ""
    return f", {result.prefill_dev_tokens} of them on the device{read}"


def _read(read_mib: float, routed_mib: float, cache_hit_pct: float) -> str:
    """Of streamed experts; nothing where none was wanted."""
    return f" ({read_mib:.1f} MiB read, {cache_hit_pct:.0f} % in memory)" if routed_mib else ""
