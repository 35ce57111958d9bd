"""What a decision is asked and what it answers."""

from dataclasses import dataclass


class Refused(ValueError):
    """A request that is wrong in itself. Nothing was prefilled and the session goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideRequest:
    """Which of `choices` does the model answer `prefix + suffix` with?

    The two halves are one text; the split says which part is worth remembering, and changes no answer.

    Raises: Refused, naming the field, where a value is not of its type or is no text.
    """

    prefix: str
    suffix: str
    choices: tuple[str, ...]  # distinct in their first token; a list is accepted
    reuse_prefix: bool = True
    system: str | None = None  # a system message before the user's; templates only
    template: bool = True  # False: prefix + suffix is the prompt itself

    def __post_init__(self) -> None:
        check_text("prefix", self.prefix)
        check_text("suffix", self.suffix)
        if self.system is not None:
            check_text("system", self.system)
        check_flag("reuse_prefix", self.reuse_prefix)
        check_flag("template", self.template)
        object.__setattr__(self, "choices", checked_texts("choices", self.choices))
        if self.system is not None and not self.template:
            raise Refused("system needs the chat template: without one, put its text at the start of prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideResult:
    """A decision and what it cost. When `cancelled`, best is -1, choice_logp is empty and the masses are 0."""

    cancelled: bool
    choices: tuple[str, ...]
    best: int  # index into choices
    choice_logp: tuple[float, ...]  # nats over the whole vocabulary; -inf where there is no mass
    outside_mass: float  # probability of every token that begins none of the choices, 0..1
    outside_text: str  # the likeliest of those tokens
    outside_text_mass: float  # and its probability, 0..1
    n_tokens: int  # the whole prompt
    n_reused: int  # of them, restored from the kept state
    n_prefilled: int  # of them, computed now
    policy_s: float  # render, tokenize, check, score: everything but state and prefill
    restore_s: float
    store_s: float
    prefill_s: float
    prefill_cpu_s: float
    prefix_state_mib: float  # what is kept for the next decision
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


def check_text(field: str, value: object) -> None:
    """Raises: Refused, unless value is a str that can be written as UTF-8."""
    if not isinstance(value, str):
        raise Refused(f"{field} must be text, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise Refused(
            f"{field} holds U+{code:04X} at character {error.start}, half of a surrogate pair: it is no text, "
            "and cannot be written as UTF-8"
        ) from error


def check_flag(field: str, value: object) -> None:
    """Raises: Refused, unless value is a bool."""
    if not isinstance(value, bool):
        raise Refused(f"{field} must be true or false, not {_kind(value)}")


def checked_texts(field: str, values: object) -> tuple[str, ...]:
    """A list of texts as a tuple. One text is not taken apart into letters.

    Raises: Refused.
    """
    if not isinstance(values, (list, tuple)):
        raise Refused(f"{field} must be a list of texts, not {_kind(values)}")
    for index, value in enumerate(values):
        check_text(f"{field}[{index}]", value)
    return tuple(values)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a value of type {type(value).__name__}"
