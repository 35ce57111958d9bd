"""The line protocol: a line in as a dataclass, a dataclass out as a line. Pure; no other place knows wire names.

Source: docs/telemetry.md is the contract; its tables are tested against what is written here.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmoe.decide import DecideRequest, DecideResult, Refused
from bmoe.generate import GenerateRequest, GenerateResult, Sampling, Step
from bmoe_native.types import Info

VERSION = 1
MAX_LINE_BYTES = 64 * 2**20
MAX_ID_CHARS = 1024  # an id is repeated in every line about its request
NO_ID = "null"

_MAX_DIGITS = 40  # beyond it no field has a use for a whole number, and Python soon refuses to print it
_SHOWN_CHARS = 40
_DECIDE = {"prefix", "suffix", "choices", "reuse_prefix", "system", "template"}
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed"}
_GENERATE = {"prompt", "n_predict", "think", "clear_kv", "system", "template", "stop", *_SAMPLING}
_KNOWN = {"decide": {"id", *_DECIDE}, "generate": {"id", *_GENERATE}, "cancel": set[str](), "close": set[str]()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """A decision is wanted. `id` is JSON text, here and below: what a host sent comes back by the letter."""

    id: str
    request: DecideRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A turn is wanted."""

    id: str
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A line that asks for nothing that can be done: it is answered with an error and the session goes on."""

    id: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop what is being served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Serve what was asked before, then end."""


Request = Decide | Generate | Bad
Command = Request | Cancel | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """One line as it was understood, and the keys in it that nothing reads."""

    command: Command
    ignored: tuple[str, ...] = ()


class _Whole(int):
    """A whole number that remembers its text. One of more digits than anybody needs is only larger than any bound."""

    text: str

    def __new__(cls, text: str) -> "_Whole":
        digits = len(text.lstrip("-"))
        value = int(text) if digits <= _MAX_DIGITS else (-1 if text.startswith("-") else 1) * 10**_MAX_DIGITS
        self = super().__new__(cls, value)
        self.text = text
        return self

    def __repr__(self) -> str:
        digits = len(self.text.lstrip("-"))
        return self.text if digits <= _MAX_DIGITS else f"{self.text[:8]}... ({digits} digits)"


def _whole(text: str) -> int:
    """Only what Python would write otherwise remembers its text: a line may hold millions of numbers."""
    short = len(text) <= _MAX_DIGITS
    return int(text) if short and text != "-0" else _Whole(text)


class _Real(float):
    """A number with a fraction or an exponent that remembers its text."""

    text: str

    def __new__(cls, text: str) -> "_Real":
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __repr__(self) -> str:
        return _shown(self.text)


def _real(text: str) -> float:
    """As _whole()."""
    value = float(text)
    return value if repr(value) == text else _Real(text)


def parse(line: bytes) -> Parsed:
    """A line without its end. Never raises: what is wrong with it is in the Bad it becomes."""
    try:
        fields = _object(line)
    except Refused as refusal:
        return Parsed(command=Bad(id=NO_ID, message=str(refusal)))
    name = fields.get("cmd")
    if name == "cancel" or name == "close":  # nothing else in them is read, an id included
        return Parsed(command=Cancel() if name == "cancel" else Close(), ignored=_ignored(fields, name))
    try:
        request_id = _id(fields.get("id"))
    except Refused as refusal:
        return Parsed(command=Bad(id=NO_ID, message=str(refusal)))
    try:
        name = _command_name(fields)
        return Parsed(command=_REQUESTS[name](request_id, fields), ignored=_ignored(fields, name))
    except Refused as refusal:
        return Parsed(command=Bad(id=request_id, message=str(refusal)))


def too_long(n_bytes: int, max_bytes: int) -> Bad:
    """What a line becomes that was longer than is read."""
    return Bad(id=NO_ID, message=f"the line has {n_bytes} bytes, {max_bytes} are allowed")


def held_bytes(command: Command) -> int:
    """About the memory that a command takes while it waits."""
    texts: list[str] = []
    if isinstance(command, Bad):
        texts = [command.message]
    elif isinstance(command, Decide):
        texts = [command.request.prefix, command.request.suffix, *command.request.choices, command.request.system or ""]
    elif isinstance(command, Generate):
        texts = [command.request.prompt, *command.request.stop, command.request.system or ""]
    return 512 + sum(8 + sys.getsizeof(text) for text in texts)


def ready(info: Info, *, load_s: float, decide: bool) -> bytes:
    """The model is open and lines are read."""
    record: dict[str, Any] = {
        "load_s": _finite(load_s),
        "arch": info.arch,
        "n_ctx": info.n_ctx,
        "think_ctl": info.think_ctl,
        "n_expert_used": info.n_expert_used,
        "protocol": VERSION,
        "decide": decide,
        "prefill_device": info.prefill_device,
    }
    return _line("READY", record)


def begin(request_id: str) -> bytes:
    """Serving a request begins."""
    return _line("BEGIN", {}, request_id)


def load(*, mb: float, ms: float) -> bytes:
    """How far loading is."""
    return _line("LOAD", {"mb": _finite(mb), "ms": _finite(ms)})


def decided(request_id: str, result: DecideResult) -> bytes:
    """A decision, the final line of its request."""
    record = {
        "cancelled": result.cancelled,
        "best": result.best,
        "choice_logp": [float(logp) if math.isfinite(logp) else None for logp in result.choice_logp],
        "n_tokens": result.n_tokens,
        "n_reused": result.n_reused,
        "n_prefilled": result.n_prefilled,
        "restore_s": _finite(result.restore_s),
        "store_s": _finite(result.store_s),
        **_prefill(result),
        "prefix_state_mib": _finite(result.prefix_state_mib),
        "outside_mass": _finite(result.outside_mass),
        "outside_text": result.outside_text,
        "outside_text_mass": _finite(result.outside_text_mass),
        "policy_s": _finite(result.policy_s),
        "cache_hit_pct": _finite(result.cache_hit_pct),
        **_prefill_routed(result),
        "prefill_dev_nodes": result.prefill_dev_nodes,
    }
    return _line("DECIDE", record, request_id)


def progress(step: Step) -> bytes:
    """One token more of the turn that is running."""
    compute_s = max(step.wall_s - step.stall_s - step.mgmt_s, 0.0)
    record = {
        "step": step.step,
        "steps": step.steps,
        "wall_ms": _finite(1000 * step.wall_s),
        "io_ms": _finite(1000 * step.io_s),
        "compute_ms": _finite(1000 * compute_s),
        "mgmt_ms": _finite(1000 * step.mgmt_s),
        "stall_ms": _finite(1000 * step.stall_s),
        "read_mb": step.read_bytes / 1e6,
        "cache_hit_pct": _finite(step.cache_hit_pct),
        "majflt": step.n_major_faults,
        "cpu_ms": _finite(1000 * step.cpu_s),
        "delta_reasoning": step.delta_reasoning,
        "delta_text": step.delta_text,
    }
    return _line("PROGRESS", record)


def done(request_id: str, result: GenerateResult, *, load_s: float) -> bytes:
    """A turn that ended, the final line of its request."""
    compute_s = max(result.generate_s - result.stall_s - result.mgmt_s, 0.0)
    record = {
        "cancelled": result.cancelled,
        "tokens": result.n_generated,
        "tok_s": _ratio(result.n_generated, result.generate_s),
        **_prefill(result),
        "n_prompt": result.n_prompt,
        "n_past": result.n_past,
        "cache_hit_pct": _finite(result.cache_hit_pct),
        "cache_resident_mib": _finite(result.cache_resident_mib),
        "cache_budget_mib": _finite(result.cache_budget_mib),
        "read_mib": _finite(result.read_mib),
        "stall_s_tok": _ratio(result.stall_s, result.n_generated),
        "io_s_tok": _ratio(result.io_s, result.n_generated),
        "compute_s_tok": _ratio(compute_s, result.n_generated),
        "mgmt_s_tok": _ratio(result.mgmt_s, result.n_generated),
        "cpu_s_tok": _ratio(result.generate_cpu_s, result.n_generated),
        "majflt_tok": _ratio(result.n_major_faults, result.n_generated),
        "load_s": _finite(load_s),
        "reasoning": result.reasoning,
        "text": result.text,
        "ending": result.ending,
        "n_reused": result.n_reused,
        "prefill_cache_hit_pct": _finite(result.prefill_cache_hit_pct),
        **_prefill_routed(result),
        "routed_mib": _finite(result.routed_mib),
        "ahead_mib": _finite(result.ahead_mib),
        "wasted_mib": _finite(result.wasted_mib),
        "prefill_dev_nodes": result.prefill_dev_nodes,
    }
    return _line("DONE", record, request_id)


def error(request_id: str, message: str, *, fatal: bool) -> bytes:
    """A request that was not answered and why; fatal: and no other will be. A path in it may be no text."""
    text = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return _line("ERROR", {"fatal": fatal, "msg": text}, request_id)


def _line(tag: str, record: dict[str, Any], request_id: str | None = None) -> bytes:
    """ASCII, so that no host's decoding can part a character; the id is put in by the letter."""
    body = json.dumps(record, allow_nan=False, separators=(",", ":"))
    if request_id is not None:
        body = f'{{"id":{request_id}{"," if record else ""}{body[1:]}'
    return f"BMOE_{tag} {body}\n".encode("ascii")


def _prefill(result: DecideResult | GenerateResult) -> dict[str, Any]:
    """What DECIDE and DONE tell of a prefill."""
    return {
        "prefill_s": _finite(result.prefill_s),
        "prefill_cpu_s": _finite(result.prefill_cpu_s),
        "prefill_read_mib": _finite(result.prefill_read_mib),
        "prefill_io_s": _finite(result.prefill_io_s),
        "prefill_stall_s": _finite(result.prefill_stall_s),
        "prefill_mgmt_s": _finite(result.prefill_mgmt_s),
        "prefill_dev_tokens": result.prefill_dev_tokens,
        "prefill_dev_read_mib": _finite(result.prefill_dev_read_mib),
        "prefill_dev_stall_s": _finite(result.prefill_dev_stall_s),
        "prefill_dev_routed": result.prefill_dev_routed,
        "prefill_dev_demand": result.prefill_dev_demand,
    }


def _prefill_routed(result: DecideResult | GenerateResult) -> dict[str, Any]:
    """What is told besides, since it came later and keys are added at the end."""
    return {
        "prefill_routed_mib": _finite(result.prefill_routed_mib),
        "prefill_ahead_mib": _finite(result.prefill_ahead_mib),
        "prefill_wasted_mib": _finite(result.prefill_wasted_mib),
    }


def _finite(value: float) -> float:
    """A time or a size as JSON can hold it: a clock that misbehaves is no reason to end a session."""
    return float(value) if math.isfinite(value) else 0.0


def _ratio(part: float, whole: float) -> float:
    """0 where nothing was measured."""
    return _finite(part / whole) if whole > 0 else 0.0


def _object(line: bytes) -> dict[str, Any]:
    """Raises: Refused, for what is no JSON object by the letter of the standard."""
    try:
        value = json.loads(
            line.decode("utf-8"),
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_no_constant,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise Refused(f"the line is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise Refused("the line is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Refused(f"the line is not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(value, dict):
        raise Refused(f"the line must be a JSON object, not {_kind(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise Refused(f"the key {_shown(key)!a} is given twice")
        fields[key] = value
    return fields


def _no_constant(name: str) -> None:
    raise Refused(f"the line is not JSON: {name} is no JSON number")


def _id(value: object) -> str:
    """An id as the JSON text that it came as.

    Raises: Refused.
    """
    if isinstance(value, (list, dict)):
        raise Refused(f"id must be a text, a number, true, false or null, not {_kind(value)}")
    if isinstance(value, _Real) and not math.isfinite(value):
        raise Refused(f"id is {value!r}, more than a number can be")
    text = value.text if isinstance(value, (_Whole, _Real)) else json.dumps(value)
    if len(text) > MAX_ID_CHARS:
        raise Refused(f"id has {len(text)} characters as JSON, {MAX_ID_CHARS} are allowed")
    return text


def _command_name(fields: dict[str, Any]) -> str:
    if "cmd" not in fields:
        raise Refused(f"cmd is missing: it is one of {', '.join(_KNOWN)}")
    name = fields["cmd"]
    if not isinstance(name, str):
        raise Refused(f"cmd must be text, not {_kind(name)}")
    if name not in _REQUESTS:
        raise Refused(f"cmd {_shown(name)!a} is unknown: it is one of {', '.join(_KNOWN)}")
    return name


def _ignored(fields: dict[str, Any], name: str) -> tuple[str, ...]:
    return tuple(_shown(key) for key in fields if key != "cmd" and key not in _KNOWN[name])


def _decide(request_id: str, fields: dict[str, Any]) -> Request:
    if "choices" not in fields:
        raise Refused("choices is missing: it must be a list of texts")
    if "prefix" not in fields and "suffix" not in fields:
        raise Refused("prefix and suffix are both missing: one of them must be text")
    given = {"prefix": "", "suffix": "", **_given(fields, _DECIDE)}
    return Decide(id=request_id, request=DecideRequest(**given))


def _generate(request_id: str, fields: dict[str, Any]) -> Request:
    if "prompt" not in fields:
        raise Refused("prompt is missing: it must be text")
    sampling = Sampling(**_given(fields, _SAMPLING))
    request = GenerateRequest(sampling=sampling, **_given(fields, _GENERATE - _SAMPLING))
    return Generate(id=request_id, request=request)


def _given(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Fields as plain values. A number that no field can hold stays what it is, to be refused by its text."""
    values = {name: fields[name] for name in names if name in fields}
    for name, value in values.items():
        if isinstance(value, _Whole) and abs(value) < 10**_MAX_DIGITS:
            values[name] = int(value)
        elif isinstance(value, _Real) and math.isfinite(value):
            values[name] = float(value)
    return values


_REQUESTS: dict[str, Callable[[str, dict[str, Any]], Request]] = {"decide": _decide, "generate": _generate}


def _shown(text: str) -> str:
    """Text of a host's as far as a message repeats it."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the number {value!r}"
