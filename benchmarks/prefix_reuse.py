"""What ten decisions on one long prefix cost, against the prefills alone that they cannot do without.

Run it with `python benchmarks/prefix_reuse.py [MODEL [PREFIX_TOKENS [SUFFIX_TOKENS]]]`. The prefills alone are timed in
the same run, before each decision, from the same state: the suffix, and once the prefix.
"""

import sys
import time

from bmoe import Session
from bmoe.models import default_cache, resolve

WORDS = "the agent looks at a screen, reads what is on it, taps one thing and waits for the next screen to come up. "
N_DECISIONS = 10


def text_of(session: Session, n_tokens: int, salt: str) -> str:
    """A text of about n_tokens."""
    words = (salt + WORDS * (n_tokens // 10)).split(" ")
    low, high = 1, len(words)
    while low < high:
        middle = (low + high) // 2
        if len(session._engine.text_tokens(" ".join(words[:middle]), add_bos=False)) < n_tokens:
            low = middle + 1
        else:
            high = middle
    return " ".join(words[:low])


def main() -> None:
    arguments = sys.argv[1:]
    model = arguments[0] if arguments else None
    n_prefix, n_suffix = (int(arguments[i]) if len(arguments) > i else n for i, n in ((1, 1500), (2, 60)))
    with Session.open(model) as session, Session.open(resolve(model, default_cache())) as bare:
        prefix = text_of(session, n_prefix, "Task: ")
        suffixes = [text_of(session, n_suffix, f"Step {i}: ") for i in range(N_DECISIONS)]
        engine = bare._engine
        decided = alone = restored = stored = 0.0
        state = None
        for suffix in suffixes:
            began = time.perf_counter()
            result = session.decide(prefix=prefix, suffix=suffix, choices=["A", "B"], template=False)
            decided += time.perf_counter() - began
            restored, stored = restored + result.restore_s, stored + result.store_s
            tokens = engine.text_tokens(prefix + suffix, add_bos=True)
            keep = result.n_tokens - result.n_prefilled if result.n_reused else n_kept(session)
            if state is None:
                alone += engine.prefill(tokens[:keep]).prefill_s
                state = engine.save_state()
            engine.load_state(state)
            alone += engine.prefill(tokens[keep:]).prefill_s
    print(f"{N_DECISIONS} decisions, {keep} tokens of prefix, {len(tokens) - keep} of suffix (the last)")
    print(f"decisions {decided:.2f} s, prefills alone {alone:.2f} s: {decided / alone:.3f} x")
    print(f"of it restoring {1e3 * restored / (N_DECISIONS - 1):.1f} ms each, storing {1e3 * stored:.1f} ms once")


def n_kept(session: Session) -> int:
    assert session._kept is not None
    return len(session._kept.tokens)


if __name__ == "__main__":
    main()
