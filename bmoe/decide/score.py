"""Logits to the log-probability of each choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bmoe.decide.backend import Float32Array

Float64Array = npt.NDArray[np.float64]
# The logarithm of the total is rounded to this many parts of a nat, more than a float32 logit can tell apart. How exp
# rounds and in which order a sum is made then no longer shows: hosts in other languages come to the same double.
GRID = 2.0**32


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
    """Log-probability of every token over the whole vocabulary, accumulated in float64.

    Shapes: [n_vocab] → [n_vocab].
    Units: nats, at most 0.
    Raises: BadLogits, for a NaN or an infinite maximum.
    """
    return _normalised(logits)[0]


def score(logits: Float32Array | Float64Array, first_tokens: Sequence[int]) -> Scores:
    """Score the choices and what is outside them, with one exp over the vocabulary.

    Raises: BadLogits, IndexError for a token outside the vocabulary.
    """
    index = np.asarray(first_tokens, np.intp)
    rest, outside, total = _normalised(logits)
    logp = rest[index]
    # Summed over what is outside, not 1 - inside: that difference would drown a small mass in rounding.
    outside[index] = 0.0
    rest[index] = -np.inf
    top = int(rest.argmax())
    if np.isin(top, index):
        top = -1
    return Scores(
        choice_logp=tuple(logp.tolist()),
        best=int(logp.argmax()),
        outside_mass=float(outside.sum() / total),
        outside_token=top,
        outside_token_mass=0.0 if top < 0 else float(outside[top] / total),
    )


def _normalised(logits: Float32Array | Float64Array) -> tuple[Float64Array, Float64Array, float]:
    """Log-probabilities, and what they come from: exp of the logits less their maximum, and the sum of that."""
    row = np.asarray(logits)
    if row.ndim != 1 or row.size == 0:
        raise BadLogits(f"logits must be one row over the vocabulary, not of shape {row.shape}")
    top = row.max()
    if not np.isfinite(top):
        raise BadLogits(
            f"the model's logits are broken: {int(np.isnan(row).sum())} of {row.size} are NaN, maximum {top}"
        )
    logp: Float64Array = np.subtract(row, top, dtype=np.float64)  # at most 0, so that exp cannot overflow
    weights: Float64Array = np.exp(logp)
    total = float(weights.sum())
    logp -= np.rint(np.log(total) * GRID) / GRID
    return logp, weights, total
