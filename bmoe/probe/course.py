"""How decisions came about, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bmoe.probe.record import Float64Array, Record

NO_ANSWER = -1  # of a layer whose logits are no numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One decision by layer; the last one's answer is the decision's."""

    answers: tuple[int, ...]  # index of the choice with the highest logit
    shares: tuple[float, ...]  # of the answer in the probability of all choices together, 0..1
    margins: tuple[float, ...]  # nats: the decision's answer less the best other; negative where that one leads
    stays_from: int  # the first layer whose answer is the decision's, as that of all behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """At how many of the decisions a layer's answer was the final one."""

    n_decisions: int
    n_agree: tuple[int, ...]  # by layer
    n_constant: int  # at how many one that always took the same place among the choices would agree, at most


def course(record: Record) -> Course | None:
    """None where there is no lens."""
    if record.lens is None:
        return None
    logits = np.nan_to_num(record.lens.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    answers = np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), NO_ANSWER)
    answers[-1] = record.best  # two that are as good as equal may have changed places in the last bit
    differing = np.flatnonzero(answers != record.best)
    in_each = shares(record)
    return Course(
        answers=tuple(answers.tolist()),
        shares=tuple(float(row[answer]) if answer >= 0 else 0.0 for row, answer in zip(in_each, answers, strict=True)),
        margins=tuple(_margins(logits, record.best).tolist()),
        stays_from=int(differing[-1]) + 1 if differing.size else 0,
    )


def shares(record: Record) -> Float64Array:
    """Of each choice in the probability of all choices together, by layer; 0 where logits are no numbers.

    Shapes: [n_layer, n_choices]. Only for a record with a lens.
    """
    assert record.lens is not None
    logits = record.lens.astype(np.float64)
    logits[~np.isfinite(logits)] = -np.inf
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    made: Float64Array = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    return made


def agreement(courses: Sequence[Course]) -> Agreement | None:
    """Over decisions of equally many layers; None without any."""
    if not courses:
        return None
    answers = np.array([course.answers for course in courses])
    agree = (answers == answers[:, -1:]).sum(axis=0)
    return Agreement(
        n_decisions=len(courses),
        n_agree=tuple(agree.tolist()),
        n_constant=int(np.unique(answers[:, -1], return_counts=True)[1].max()),
    )


def _margins(logits: Float64Array, best: int) -> Float64Array:
    """0 where there is nothing to compare with."""
    others = np.delete(logits, best, axis=1)
    if not others.shape[1]:
        return np.zeros(len(logits))
    with np.errstate(invalid="ignore"):
        margins = logits[:, best] - others.max(axis=1)
    made: Float64Array = np.where(np.isfinite(margins), margins, 0.0)
    return made
