"""Logits to the log-probability of each choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmoe.decide.backend import Float32Array

Float64Array = npt.NDArray[np.float64]


class BadLogits(ArithmeticError):
    """Logits that are no distribution: the model or its file is broken, and no answer can be read from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the next-token distribution says about the choices."""

    choice_logp: tuple[float, ...]  # nats, at most 0; -inf where there is no mass
    best: int
    outside_mass: float  # 0..1
    outside_token: int  # the likeliest token that begins no choice; -1 where the choices are the vocabulary
    outside_token_mass: float  # 0..1


def log_softmax(logits: Float32Array | Float64Array) -> Float64Array:
    """Log-probability of every token, accumulated in float64.

    Shapes: [n_vocab] → [n_vocab].
    Units: nats, at most 0.
    Raises: BadLogits, for a NaN or an infinite maximum.
    """
    shifted, weights = _shift(logits)
    result: Float64Array = shifted - np.log(weights.sum())
    return result


def choice_logp(logits: Float32Array | Float64Array, first_tokens: Sequence[int]) -> Float64Array:
    """Log-probability of each choice's first token over the whole vocabulary.

    Shapes: logits [n_vocab], first_tokens [n_choices] → [n_choices].
    Units: nats, at most 0.
    Source: log-softmax; why not over the choices alone: docs/decide.md.
    """
    return log_softmax(logits)[np.asarray(first_tokens, np.intp)]


def score(logits: Float32Array | Float64Array, first_tokens: Sequence[int]) -> Scores:
    """Score the choices and what is outside them, in one pass over the vocabulary.

    Raises: BadLogits, IndexError for a token outside the vocabulary.
    """
    index = np.asarray(first_tokens, np.intp)
    shifted, weights = _shift(logits)
    total = weights.sum()
    logp = shifted[index] - np.log(total)
    # Summed over what is outside, not 1 - inside: that difference would drown a small mass in rounding.
    outside = weights.copy()
    outside[index] = 0.0
    shifted[index] = -np.inf
    top = int(shifted.argmax())
    if np.isin(top, index):
        top = -1
    return Scores(
        choice_logp=tuple(logp.tolist()),
        best=int(logp.argmax()),
        outside_mass=float(outside.sum() / total),
        outside_token=top,
        outside_token_mass=0.0 if top < 0 else float(outside[top] / total),
    )


def _shift(logits: Float32Array | Float64Array) -> tuple[Float64Array, Float64Array]:
    """Logits less their maximum, which no exp can overflow on, and exp of that."""
    row = np.asarray(logits, np.float64)
    if row.ndim != 1 or row.size == 0:
        raise BadLogits(f"logits must be one row over the vocabulary, not of shape {row.shape}")
    top = row.max()
    if not np.isfinite(top):
        raise BadLogits(
            f"the model's logits are broken: {int(np.isnan(row).sum())} of {row.size} are NaN, maximum {top}"
        )
    shifted: Float64Array = row - top
    weights: Float64Array = np.exp(shifted)
    return shifted, weights
