"""Where prefix and suffix join, on tokens."""

from collections.abc import Sequence


def tokens_to_keep(prompt: Sequence[int], prefix_alone: Sequence[int]) -> int:
    """How many of the prompt's first tokens belong to the prefix whatever the suffix is.

    The two renderings agree up to the join. One matching token is given back: a merge across the join can make
    the last one that looks shared another token in context. So at least one token is always left to compute.

    Units: tokens, 0..len(prompt) - 1.
    """
    common = 0
    for ours, theirs in zip(prompt, prefix_alone, strict=False):
        if ours != theirs:
            break
        common += 1
    return max(common - 1, 0)
