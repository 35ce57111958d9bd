"""The steps of a turn in order."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bmoe.decide.backend import ChatMessage
from bmoe.decide.prefix import MIB
from bmoe.decide.reads import Reads
from bmoe.decide.types import Refused
from bmoe.generate.backend import GenerateBackend, TurnPrompt
from bmoe.generate.conversation import Conversation
from bmoe.generate.text import Delta, TurnText
from bmoe.generate.types import Ending, GenerateRequest, GenerateResult, Step

Clock = Callable[[], float]
OnStep = Callable[[Step], None]


@dataclass(slots=True, kw_only=True)
class _Costs:
    """What the calls of one turn came to."""

    n_reused: int = 0
    n_prompt: int = 0
    n_generated: int = 0
    prefill_s: float = 0.0
    prefill_cpu_s: float = 0.0
    generate_s: float = 0.0
    generate_cpu_s: float = 0.0
    n_major_faults: int = 0
    prefill_reads: Reads = field(default_factory=Reads)
    reads: Reads = field(default_factory=Reads)  # while generating


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn, from when it was found right to when it ends."""

    request: GenerateRequest
    messages: list[ChatMessage]
    prompt: TurnPrompt
    text: TurnText
    on_step: OnStep = lambda step: None
    costs: _Costs = field(default_factory=_Costs)
    step_cpu_s: float = 0.0
    step_faults: int = 0
    step_reads: Reads = field(default_factory=Reads)
    step_began: float = 0.0


class Generator:
    """Generates over one backend and remembers one conversation."""

    def __init__(self, backend: GenerateBackend, *, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self.conversation = Conversation()

    def generate(self, turn: Turn, on_step: OnStep = lambda step: None) -> GenerateResult:
        """Answer a turn that prepare() has made.

        Raises: BadLogits; whatever the backend raises while it computes.
        """
        turn.on_step = on_step
        if turn.request.clear_kv:
            self.conversation.clear()
        ending = self._prefill(turn)
        if ending is None:
            began = self._clock()
            ending = self._decode(turn)
            turn.costs.generate_s = self._clock() - began
        self._remember(turn, ending)
        return self._result(turn, ending)

    def prepare(self, request: GenerateRequest) -> Turn:
        """Everything that can be refused about a request; nothing changes yet.

        Raises: Refused.
        """
        past = [] if request.clear_kv else self.conversation.messages
        if not past and request.system is not None:
            past = [("system", request.system)]
        messages = [*past, ("user", request.prompt)]
        if request.template:
            prompt = self._backend.turn_prompt(messages, think=request.think)
        else:
            tokens = self._backend.text_tokens(request.prompt, add_bos=True)
            prompt = TurnPrompt(tokens=tokens, in_reasoning=False)
        if not prompt.tokens:
            raise Refused("prompt is empty and the model adds no token of its own: there is nothing to go on from")
        if len(prompt.tokens) > self._backend.n_ctx:
            before, anew = (
                ("", "") if request.clear_kv else (" with what was said before", "begin anew with clear_kv, ")
            )
            raise Refused(
                f"the prompt is {len(prompt.tokens)} tokens{before}, and the context holds {self._backend.n_ctx}: "
                f"shorten it, {anew}or open the model with a larger context"
            )
        tags = self._backend.reasoning_tags if request.template else ("", "")
        text = TurnText(tags, in_reasoning=prompt.in_reasoning, stops=request.stop)
        return Turn(request=request, messages=messages, prompt=prompt, text=text)

    def _prefill(self, turn: Turn) -> Ending | None:
        costs, tokens = turn.costs, turn.prompt.tokens
        costs.n_reused = self.conversation.resume(self._backend, tokens)
        rest = tokens[costs.n_reused :]
        outcome = self._backend.prefill(rest)
        self.conversation.went_on(self._backend, rest)
        costs.n_prompt = outcome.n_tokens
        costs.prefill_s, costs.prefill_cpu_s = outcome.prefill_s, outcome.prefill_cpu_s
        costs.prefill_reads.add(outcome)
        return "cancelled" if outcome.cancelled else None

    def _decode(self, turn: Turn) -> Ending:
        if turn.request.n_predict == 0:
            return "length"
        self._backend.start_sampling(turn.request.sampling)
        turn.step_began = self._clock()
        while True:
            token = self._backend.sample()
            if self._backend.ends_turn(token):
                return self._last_words(turn) or "end"
            turn.costs.n_generated += 1
            delta = turn.text.feed(self._backend.token_bytes(token), control=self._backend.is_control(token))
            ending = self._ending(turn)
            if ending is not None:
                rest = turn.text.flush()
                ending = "stop" if turn.text.stopped else ending
                delta = Delta(text=delta.text + rest.text, reasoning=delta.reasoning + rest.reasoning)
            self._report(turn, delta)
            if ending is not None:
                return ending
            if not self._advance(turn, token):
                self._last_words(turn)
                return "cancelled"

    def _ending(self, turn: Turn) -> Ending | None:
        if turn.text.stopped:
            return "stop"
        if turn.costs.n_generated == turn.request.n_predict:
            return "length"
        return "context" if self._backend.position == self._backend.n_ctx else None

    def _advance(self, turn: Turn, token: int) -> bool:
        outcome = self._backend.prefill([token])
        self.conversation.went_on(self._backend, [token])
        turn.step_cpu_s, turn.step_faults = outcome.prefill_cpu_s, outcome.n_major_faults
        turn.costs.generate_cpu_s += outcome.prefill_cpu_s
        turn.costs.n_major_faults += outcome.n_major_faults
        turn.step_reads.add(outcome)
        turn.costs.reads.add(outcome)
        return not outcome.cancelled

    def _last_words(self, turn: Turn) -> Ending | None:
        """What was held back for a tag or a stop string that did not come; "stop" where it holds another."""
        rest = turn.text.flush()
        if rest.text or rest.reasoning:
            self._report(turn, rest)
        return "stop" if turn.text.stopped else None

    def _report(self, turn: Turn, delta: Delta) -> None:
        now = self._clock()
        step = Step(
            step=turn.costs.n_generated,
            steps=turn.request.n_predict,
            wall_s=now - turn.step_began,
            cpu_s=turn.step_cpu_s,
            n_major_faults=turn.step_faults,
            delta_text=delta.text,
            delta_reasoning=delta.reasoning,
            read_bytes=turn.step_reads.read_bytes,
            io_s=turn.step_reads.io_s,
            stall_s=turn.step_reads.stall_s,
            mgmt_s=turn.step_reads.mgmt_s,
            cache_hit_pct=turn.step_reads.cache_hit_pct,
        )
        turn.step_began, turn.step_cpu_s, turn.step_faults, turn.step_reads = now, 0.0, 0, Reads()
        turn.on_step(step)

    def _remember(self, turn: Turn, ending: Ending) -> None:
        """The turn becomes history; one that was cancelled before it said anything never was."""
        said = turn.text.text
        if not turn.request.template:
            self.conversation.messages = []
        elif ending != "cancelled" or said:
            self.conversation.messages = [*turn.messages, ("assistant", said)]

    def _result(self, turn: Turn, ending: Ending) -> GenerateResult:
        costs = turn.costs
        return GenerateResult(
            ending=ending,
            text=turn.text.text,
            reasoning=turn.text.reasoning,
            n_generated=costs.n_generated,
            n_prompt=costs.n_prompt,
            n_reused=costs.n_reused,
            n_past=self._backend.position,
            prefill_s=costs.prefill_s,
            prefill_cpu_s=costs.prefill_cpu_s,
            generate_s=costs.generate_s,
            generate_cpu_s=costs.generate_cpu_s,
            n_major_faults=costs.n_major_faults,
            prefill_cache_hit_pct=costs.prefill_reads.cache_hit_pct,
            read_mib=costs.reads.read_bytes / MIB,
            io_s=costs.reads.io_s,
            stall_s=costs.reads.stall_s,
            mgmt_s=costs.reads.mgmt_s,
            routed_mib=costs.reads.routed_bytes / MIB,
            ahead_mib=costs.reads.ahead_bytes / MIB,
            wasted_mib=costs.reads.wasted_bytes / MIB,
            cache_hit_pct=costs.reads.cache_hit_pct,
            cache_resident_mib=self._backend.cache_resident_mib,
            cache_budget_mib=self._backend.cache_budget_mib,
            **costs.prefill_reads.of_prefill(),
        )
