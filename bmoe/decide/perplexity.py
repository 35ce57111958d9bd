"""How well a model foretells a text: the log-probability of each of its tokens, and what they come to."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bmoe.decide.backend import Backend, Float32Array, PrefillOutcome
from bmoe.decide.choices import first_tokens
from bmoe.decide.reads import Reads
from bmoe.decide.score import log_softmax, score
from bmoe.decide.types import Refused, check_text, checked_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """How far a text is scored, and what it comes to so far."""

    n_scored: int
    n_to_score: int
    nll: float  # mean over those scored, in nats


OnScored = Callable[[Scored], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityRequest:
    """Score a raw text: no template, BOS where the model wants one.

    Source: the strided evaluation of fixed-length models: windows of `window` tokens, each begun `stride` after the one
    before, and in each only the tokens that none before it has scored, so that every token but the first is scored
    once, with at least window - stride tokens before it where the text has them.
    """

    text: str
    window: int = 0  # tokens; 0: the context
    stride: int = 0  # tokens; 0: half the window
    choices: tuple[str, ...] = ()  # also score these as what follows the text, as a decision without a template does

    def __post_init__(self) -> None:
        check_text("text", self.text)
        object.__setattr__(self, "choices", checked_texts("choices", self.choices))
        for name in ("window", "stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise Refused(f"{name} must be a whole number of tokens, 0 for the default")


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityResult:
    """A scored text. When `cancelled`, token_logp holds what was scored by then and choice_logp is empty."""

    cancelled: bool
    n_tokens: int
    token_logp: tuple[float, ...]  # nats, of every token but the first, in order; -inf where there is no mass
    choice_logp: tuple[float, ...]  # nats, as a decision's
    n_prefilled: int
    prefill_s: float
    prefill_read_mib: float = 0.0  # of streamed experts, like what follows
    prefill_io_s: float = 0.0  # in which something was being read
    prefill_stall_s: float = 0.0  # computing waited for reads
    prefill_mgmt_s: float = 0.0  # choosing what to keep in memory
    prefill_routed_mib: float = 0.0  # asked for by the layers' routers
    prefill_ahead_mib: float = 0.0  # read before a router had asked
    prefill_wasted_mib: float = 0.0  # of that, never asked for
    cache_hit_pct: float = 0.0  # of the experts asked for, those that were in memory
    prefill_dev_tokens: int = 0  # computed on the prefill device, like what follows
    prefill_dev_read_mib: float = 0.0  # of streamed experts, not in prefill_read_mib
    prefill_dev_stall_s: float = 0.0  # computing waited for weights
    prefill_dev_routed: int = 0  # experts asked for, each layer's of each piece once
    prefill_dev_demand: int = 0  # of those, not foreseen
    prefill_dev_nodes: int = 0  # of graphs

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of a token, in nats; NaN where none was scored."""
        return -math.fsum(self.token_logp) / len(self.token_logp) if self.token_logp else math.nan

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite past what a float holds."""
        return math.exp(self.nll) if not self.nll > 700 else math.inf

    @property
    def stderr(self) -> float:
        """Standard error of nll, in nats, with the tokens taken as independent; NaN for fewer than two."""
        count = len(self.token_logp)
        if count < 2:
            return math.nan
        mean = -self.nll
        return math.sqrt(math.fsum((logp - mean) ** 2 for logp in self.token_logp) / (count - 1) / count)


class RowsBackend(Backend, Protocol):
    """A backend that gives the logits after each token of a piece."""

    @property
    def max_rows(self) -> int:
        """Most tokens of one prefill_rows()."""
        ...

    def prefill_rows(self, tokens: Sequence[int]) -> tuple[PrefillOutcome, Float32Array]:
        """Compute tokens in one piece. Shapes: tokens [n] → rows float32 [n, n_vocab]."""
        ...


@dataclass(slots=True)
class _Work:
    token_logp: list[float]
    n_prefilled: int = 0
    prefill_s: float = 0.0
    logp_sum: float = 0.0
    reads: Reads = field(default_factory=Reads)

    def add(self, outcome: PrefillOutcome) -> bool:
        """Whether it goes on."""
        self.n_prefilled += outcome.n_tokens
        self.prefill_s += outcome.prefill_s
        self.reads.add(outcome)
        return not outcome.cancelled


class Perplexity:
    """Scores texts over one backend, whose state it uses up."""

    def __init__(self, backend: RowsBackend) -> None:
        self._backend = backend

    def score(self, request: PerplexityRequest, on_scored: OnScored = lambda scored: None) -> PerplexityResult:
        """Score a text.

        Raises: Refused before anything is prefilled; BadLogits; whatever the backend raises while it computes.
        """
        tokens, window, stride = self._checked(request)
        choice_tokens = first_tokens(self._backend, request.choices) if request.choices else []
        work = _Work([])
        # The choices come first and in a prefill like a decision's: rows of a wider result round differently.
        choice_logp = self._choices(tokens, choice_tokens, work) if choice_tokens else ()
        done = choice_logp is not None and all(
            self._span(tokens, begin, first, end, work, on_scored)
            for begin, first, end in spans(len(tokens), window, stride)
        )
        self._backend.drop_state()
        return PerplexityResult(
            cancelled=not done,
            n_tokens=len(tokens),
            token_logp=tuple(work.token_logp),
            choice_logp=(choice_logp or ()) if done else (),
            n_prefilled=work.n_prefilled,
            prefill_s=work.prefill_s,
            cache_hit_pct=work.reads.cache_hit_pct,
            **work.reads.of_prefill(),
        )

    def _checked(self, request: PerplexityRequest) -> tuple[list[int], int, int]:
        n_ctx = self._backend.n_ctx
        window = request.window or n_ctx
        stride = request.stride or max(window // 2, 1)
        if not 2 <= window <= n_ctx:
            raise Refused(f"window is {window}, allowed are 2 to the context's {n_ctx} tokens")
        if stride >= window:
            raise Refused(f"stride is {stride} and must be less than the window of {window}")
        tokens = self._backend.text_tokens(request.text, add_bos=True)
        if len(tokens) < 2:
            raise Refused(f"the text is {len(tokens)} tokens: there is none to foretell from one before it")
        if request.choices and len(tokens) > n_ctx:
            raise Refused(f"the text is {len(tokens)} tokens: choices after it need it whole in the context of {n_ctx}")
        return tokens, window, stride

    def _choices(self, tokens: Sequence[int], choices: Sequence[int], work: _Work) -> tuple[float, ...] | None:
        self._backend.drop_state()
        if not work.add(self._backend.prefill(tokens)):
            return None
        return score(self._backend.logits(), choices).choice_logp

    def _span(self, tokens: Sequence[int], begin: int, first: int, end: int, work: _Work, on_scored: OnScored) -> bool:
        """Score tokens[first:end] from a state that begins at begin; False when cancelled."""
        self._backend.drop_state()
        if first - 1 > begin and not work.add(self._backend.prefill(tokens[begin : first - 1])):
            return False
        for at in range(first - 1, end - 1, self._backend.max_rows):
            piece = tokens[at : min(at + self._backend.max_rows, end - 1)]
            outcome, rows = self._backend.prefill_rows(piece)
            if not work.add(outcome):
                return False
            for offset, row in enumerate(rows):
                work.token_logp.append(float(log_softmax(row)[tokens[at + offset + 1]]))
                work.logp_sum += work.token_logp[-1]
            n_scored = len(work.token_logp)
            on_scored(Scored(n_scored=n_scored, n_to_score=len(tokens) - 1, nll=-work.logp_sum / n_scored))
        return True


def spans(n_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin of the window, first token scored, end of the window), each token but the first scored once."""
    first = 1
    for begin in range(0, n_tokens, stride):
        end = min(begin + window, n_tokens)
        if end > first:
            yield begin, first, end
            first = end
        if end == n_tokens:
            return
