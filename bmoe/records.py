"""Requests and results as JSON objects: a line in, a dict out. The only place that knows the keys."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe.decide import DecideRequest, DecideResult, Refused
from bmoe.decide.perplexity import PerplexityResult
from bmoe.decide.types import check_text

Letter = Callable[..., DecideRequest]
"""Session.lettered: (question, options, reuse_prefix=, system=, template=) → request."""

_WHOLE = {"prefix", "suffix", "choices"}
_LETTERED = {"question", "options"}
_EITHER = {"id", "reuse_prefix", "system", "template"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it came, and the texts behind its labels where it was a question with options."""

    request: DecideRequest
    options: tuple[str, ...] | None = None


def read_object(line: bytes) -> dict[str, Any]:
    """One line as a JSON object, by the letter of the standard.

    Raises: Refused.
    """
    try:
        value = json.loads(
            line.decode("utf-8"), parse_int=_whole_number, parse_constant=_no_constant, object_pairs_hook=_unique
        )
    except UnicodeDecodeError as error:
        raise Refused(f"the line is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise Refused("the line is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Refused(f"the line is not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(value, dict):
        raise Refused("the line must be a JSON object")
    return value


def request_id(fields: dict[str, Any]) -> str | int | None:
    """The id a caller gave, to be handed back as it came.

    Raises: Refused, for one of another type.
    """
    value = fields.get("id")
    if isinstance(value, str):
        check_text("id", value)
    elif isinstance(value, bool) or not isinstance(value, (int, type(None))):
        raise Refused("id must be a text, a whole number or null")
    return value


def asked(fields: dict[str, Any], letter: Letter, *, template: bool = True, system: str | None = None) -> Asked:
    """The fields of a line as a request; template is what a line that does not say gets.

    system is what the session adds where a line has none of its own.

    Raises: Refused, naming the field and the type it should have.
    """
    given = set(fields)
    if unknown := given - _WHOLE - _LETTERED - _EITHER:
        raise Refused(f"unknown key {min(unknown)!r}")
    if given & _WHOLE and given & _LETTERED:
        raise Refused("a line is either prefix, suffix and choices, or question and options")
    common: dict[str, Any] = {key: fields[key] for key in ("reuse_prefix", "system") if key in fields}
    common["template"] = fields.get("template", template)
    if common["template"] is False and common.get("system") is None and system is not None:
        raise Refused(
            "a raw prompt has no system message: template is false here, and there is one for the whole batch"
        )
    if given & _LETTERED:
        question, options = _needed(fields, "question"), _needed(fields, "options")
        return Asked(request=letter(question, options, **common), options=tuple(options))
    choices = _needed(fields, "choices")
    if not given & {"prefix", "suffix"}:
        raise Refused("prefix and suffix are both missing")
    prefix, suffix = fields.get("prefix", ""), fields.get("suffix", "")
    return Asked(request=DecideRequest(prefix=prefix, suffix=suffix, choices=choices, **common))


def result_record(result: DecideResult, options: Sequence[str] | None = None) -> dict[str, Any]:
    """A decision as a JSON object; a choice without mass is null, since JSON has no infinity."""
    record: dict[str, Any] = {"choices": list(result.choices)}
    if options is not None:
        record["options"] = list(options)
    record |= {
        "best": result.best,
        "choice_logp": [logp if math.isfinite(logp) else None for logp in result.choice_logp],
        "outside_mass": result.outside_mass,
        "outside_text": result.outside_text,
        "outside_text_mass": result.outside_text_mass,
        "n_tokens": result.n_tokens,
        "n_reused": result.n_reused,
        "n_prefilled": result.n_prefilled,
        "policy_s": result.policy_s,
        "restore_s": result.restore_s,
        "store_s": result.store_s,
        "prefill_s": result.prefill_s,
        "prefill_cpu_s": result.prefill_cpu_s,
        "prefix_state_mib": result.prefix_state_mib,
        **reads_record(result),
    }
    return record


def reads_record(result: DecideResult | PerplexityResult) -> dict[str, float]:
    """What was read of streamed experts, and what a prefill device computed; all 0 without either."""
    return {
        "prefill_read_mib": result.prefill_read_mib,
        "prefill_io_s": result.prefill_io_s,
        "prefill_stall_s": result.prefill_stall_s,
        "prefill_mgmt_s": result.prefill_mgmt_s,
        "prefill_routed_mib": result.prefill_routed_mib,
        "prefill_ahead_mib": result.prefill_ahead_mib,
        "prefill_wasted_mib": result.prefill_wasted_mib,
        "cache_hit_pct": result.cache_hit_pct,
        "prefill_dev_tokens": result.prefill_dev_tokens,
        "prefill_dev_read_mib": result.prefill_dev_read_mib,
        "prefill_dev_stall_s": result.prefill_dev_stall_s,
        "prefill_dev_routed": result.prefill_dev_routed,
        "prefill_dev_demand": result.prefill_dev_demand,
        "prefill_dev_nodes": result.prefill_dev_nodes,
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Refused("a key is given twice")
    return fields


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python bounds the digits, for the time they would take
        raise Refused(f"a whole number of {len(digits)} digits is too long to read: write it as a text") from error


def _no_constant(name: str) -> None:
    raise Refused(f"the line is not JSON: {name} is no JSON number")


def _needed(fields: dict[str, Any], key: str) -> Any:
    if key not in fields:
        raise Refused(f"{key} is missing")
    return fields[key]
