"""The steps of a decision in order, nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bmoe.decide.backend import Backend, ChatMessage
from bmoe.decide.choices import first_tokens
from bmoe.decide.prefix import KeptPrefix
from bmoe.decide.reads import Reads
from bmoe.decide.score import Scores, score
from bmoe.decide.split import tokens_to_keep
from bmoe.decide.types import DecideRequest, DecideResult, Refused

Clock = Callable[[], float]


@dataclass(slots=True, kw_only=True)
class _Costs:
    """What the state and prefill calls of one decision came to."""

    n_reused: int = 0
    n_prefilled: int = 0
    restore_s: float = 0.0
    store_s: float = 0.0
    prefill_s: float = 0.0
    prefill_cpu_s: float = 0.0
    reads: Reads = field(default_factory=Reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A request that has passed every check: from here on only the engine can fail."""

    choices: tuple[str, ...]
    choice_tokens: Sequence[int]
    prompt: Sequence[int]
    keep: int | None  # None: prefill whole and leave the kept state alone
    costs: _Costs = field(default_factory=_Costs)


class Decider:
    """Decides over one backend, with at most one kept prefix state; kept None is a prefix cache that is off."""

    def __init__(self, backend: Backend, *, kept: KeptPrefix | None, clock: Clock) -> None:
        self._backend = backend
        self._kept = kept
        self._clock = clock

    def decide(self, request: DecideRequest) -> DecideResult:
        """Answer one request.

        Raises: Refused before anything is prefilled; BadLogits; whatever the backend raises while it computes.
        """
        started = self._clock()
        plan = self._checked(request)
        prepared = self._clock()
        computed = self._compute(plan)
        scoring = self._clock()
        scores = score(self._backend.logits(), plan.choice_tokens) if computed else None
        outside_text = self._token_text(scores)
        policy_s = (prepared - started) + (self._clock() - scoring)
        return self._result(plan, scores, outside_text, policy_s)

    def _checked(self, request: DecideRequest) -> _Plan:
        tokens = first_tokens(self._backend, request.choices)
        prompt = self._tokens(request, request.prefix + request.suffix)
        if not prompt:
            raise Refused("prefix and suffix are both empty and the model adds no token of its own: there is no prompt")
        if len(prompt) > self._backend.n_ctx:
            raise Refused(
                f"the prompt is {len(prompt)} tokens and the context holds {self._backend.n_ctx}: "
                "shorten it, or open the model with a larger context"
            )
        keep = self._keep(request, prompt) if request.reuse_prefix and self._kept is not None else None
        return _Plan(choices=request.choices, choice_tokens=tokens, prompt=prompt, keep=keep)

    def _keep(self, request: DecideRequest, prompt: Sequence[int]) -> int:
        try:
            alone = self._tokens(request, request.prefix)
        except Refused:
            # The whole prompt has rendered; a template may still refuse this half, an empty message for one.
            return 0
        return tokens_to_keep(prompt, alone)

    def _tokens(self, request: DecideRequest, text: str) -> list[int]:
        if not request.template:
            return self._backend.text_tokens(text, add_bos=True)
        messages: list[ChatMessage] = [] if request.system is None else [("system", request.system)]
        return self._backend.chat_tokens([*messages, ("user", text)])

    def _compute(self, plan: _Plan) -> bool:
        """Bring the state to the end of the prompt; False when cancelled, with the state left empty."""
        if plan.keep is None or self._kept is None:
            self._backend.drop_state()
            return self._prefill(plan, plan.prompt)
        done = self._start(self._kept, plan)
        if plan.keep > done:
            if not self._prefill(plan, plan.prompt[done : plan.keep]):
                return False
            began = self._clock()
            self._kept.store(self._backend, plan.prompt[: plan.keep])
            plan.costs.store_s = self._clock() - began
        return self._prefill(plan, plan.prompt[plan.keep :])

    def _start(self, kept: KeptPrefix, plan: _Plan) -> int:
        """Restore the kept state where the prefix continues it, else start empty; tokens the state then holds."""
        if not kept.begins(plan.prompt[: plan.keep]):
            self._backend.drop_state()
            return 0
        began = self._clock()
        kept.restore(self._backend)
        plan.costs.restore_s = self._clock() - began
        plan.costs.n_reused = len(kept.tokens)
        return plan.costs.n_reused

    def _prefill(self, plan: _Plan, tokens: Sequence[int]) -> bool:
        outcome = self._backend.prefill(tokens)
        plan.costs.n_prefilled += outcome.n_tokens
        plan.costs.prefill_s += outcome.prefill_s
        plan.costs.prefill_cpu_s += outcome.prefill_cpu_s
        plan.costs.reads.add(outcome)
        if outcome.cancelled:
            self._backend.drop_state()
        return not outcome.cancelled

    def _token_text(self, scores: Scores | None) -> str:
        return "" if scores is None or scores.outside_token < 0 else self._backend.token_text(scores.outside_token)

    def _result(self, plan: _Plan, scores: Scores | None, outside_text: str, policy_s: float) -> DecideResult:
        costs = plan.costs
        return DecideResult(
            cancelled=scores is None,
            choices=plan.choices,
            best=scores.best if scores else -1,
            choice_logp=scores.choice_logp if scores else (),
            outside_mass=scores.outside_mass if scores else 0.0,
            outside_text=outside_text,
            outside_text_mass=scores.outside_token_mass if scores else 0.0,
            n_tokens=len(plan.prompt),
            n_reused=costs.n_reused,
            n_prefilled=costs.n_prefilled,
            policy_s=policy_s,
            restore_s=costs.restore_s,
            store_s=costs.store_s,
            prefill_s=costs.prefill_s,
            prefill_cpu_s=costs.prefill_cpu_s,
            prefix_state_mib=self._kept.size_mib if self._kept else 0.0,
            cache_hit_pct=costs.reads.cache_hit_pct,
            **costs.reads.of_prefill(),
        )
