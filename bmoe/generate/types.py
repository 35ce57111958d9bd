"""Requests and results of generating."""

from dataclasses import dataclass, field
from typing import Literal

from bmoe.decide.types import Refused, check_flag, check_text, checked_texts

Ending = Literal["end", "stop", "length", "context", "cancelled"]
"""Why a turn ended: the model's own end, a stop string, n_predict, a full context, a cancel."""

MAX_PREDICT = 2**31 - 1
MAX_SEED = 2**32 - 1
MAX_STOPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The default is greedy: the likeliest one, and no seed plays a part.

    Source: llama.cpp's sampler chain in the order top-k, top-p, min-p, temperature.
    """

    temperature: float = 0.0  # 0: greedy, nothing else acts
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together hold this mass; 1: all
    min_p: float = 0.0  # keep tokens of at least this share of the likeliest one's probability; 0: all
    seed: int = 0  # 0..2**32 - 1; equal requests after equal histories give equal texts

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        check_whole("top_k", self.top_k, 0, MAX_PREDICT)
        check_whole("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn: a prompt, and how long and in what way to answer it."""

    prompt: str
    n_predict: int = 128  # tokens at most; 0: the prompt is prefilled and nothing generated
    think: bool = False  # let the model reason first, where its template can
    clear_kv: bool = True  # forget the conversation first; False continues it
    system: str | None = None  # begins a conversation: refused with clear_kv False
    template: bool = True  # False: the prompt is raw text, a conversation of its own
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()  # the text ends before the one of these that is complete first

    def __post_init__(self) -> None:
        check_text("prompt", self.prompt)
        check_whole("n_predict", self.n_predict, 0, MAX_PREDICT)
        for name in ("think", "clear_kv", "template"):
            check_flag(name, getattr(self, name))
        if self.system is not None:
            check_text("system", self.system)
        stops = checked_texts("stop", self.stop)
        if len(stops) > MAX_STOPS:
            raise Refused(f"stop has {len(stops)} texts, {MAX_STOPS} are allowed")
        if "" in stops:
            raise Refused("stop holds an empty text, which would end every answer before it begins")
        object.__setattr__(self, "stop", stops)
        if self.system is not None and not self.clear_kv:
            raise Refused("system begins a conversation: it cannot be given with clear_kv false")
        if not self.template and (self.system is not None or self.think or not self.clear_kv):
            raise Refused("template false is a raw prompt: system, think and clear_kv false mean nothing there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One token more, as it is reported while generating. Deltas hold whole characters and may be empty."""

    step: int  # from 1
    steps: int  # n_predict
    wall_s: float  # since the step before
    cpu_s: float
    n_major_faults: int
    delta_text: str
    delta_reasoning: str
    read_bytes: int = 0  # of streamed experts, like what follows
    io_s: float = 0.0  # in which something was being read
    stall_s: float = 0.0  # computing waited for reads
    mgmt_s: float = 0.0  # choosing what to keep in memory
    cache_hit_pct: float = 0.0  # of the experts asked for, those that were in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A turn that ended. The deltas of its steps, joined, are its text and its reasoning."""

    ending: Ending
    text: str
    reasoning: str
    n_generated: int  # tokens, the one that ended the turn not counted
    n_prompt: int  # tokens prefilled this turn
    n_reused: int  # tokens of the prompt that the state held already
    n_past: int  # tokens the state holds after it
    prefill_s: float
    prefill_cpu_s: float
    generate_s: float  # after the prefill
    generate_cpu_s: float
    n_major_faults: int  # while generating
    prefill_read_mib: float = 0.0  # of streamed experts, like what follows
    prefill_io_s: float = 0.0  # in which something was being read
    prefill_stall_s: float = 0.0  # computing waited for reads
    prefill_mgmt_s: float = 0.0  # choosing what to keep in memory
    prefill_routed_mib: float = 0.0  # asked for by the layers' routers
    prefill_ahead_mib: float = 0.0  # read before a router had asked
    prefill_wasted_mib: float = 0.0  # of that, never asked for
    prefill_cache_hit_pct: float = 0.0  # of the experts asked for, those that were in memory
    read_mib: float = 0.0  # while generating, like what follows; meant as above
    io_s: float = 0.0
    stall_s: float = 0.0
    mgmt_s: float = 0.0
    routed_mib: float = 0.0
    ahead_mib: float = 0.0
    wasted_mib: float = 0.0
    cache_hit_pct: float = 0.0
    cache_resident_mib: float = 0.0  # of experts, in memory after it
    cache_budget_mib: float = 0.0  # and what may be
    prefill_dev_tokens: int = 0  # of the prompt, computed on the prefill device, like what follows
    prefill_dev_read_mib: float = 0.0  # of streamed experts, not in prefill_read_mib
    prefill_dev_stall_s: float = 0.0  # computing waited for weights
    prefill_dev_routed: int = 0  # experts asked for, each layer's of each piece once
    prefill_dev_demand: int = 0  # of those, not foreseen
    prefill_dev_nodes: int = 0  # of graphs

    @property
    def cancelled(self) -> bool:
        return self.ending == "cancelled"


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises: Refused, naming the bounds, for what is no whole number within them."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name} must be a whole number")
    if not low <= value <= high:
        raise Refused(f"{name} is {_shown(value)}, allowed are {low} to {high}")


def _shown(value: float) -> str:
    try:
        return repr(value)
    except ValueError:  # Python prints no whole number of thousands of digits
        return "a number of thousands of digits"


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"{name} must be a number")
    if not low <= value <= high:
        raise Refused(f"{name} is {_shown(value)}, allowed are {low:g} to {high:g}")
