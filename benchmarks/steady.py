"""Resident memory over many decisions and turns in one session, and whether equal requests stay equal.

Run it with `python benchmarks/steady.py MODEL [DECISIONS [GENERATES]]`. Prints the slope of the process's anonymous
memory over the second half of the decisions, by least squares, and exits with 1 where it is 1 KiB a decision or
more, or where two equal requests differ.
"""

import random
import sys
from pathlib import Path

import numpy as np

from bmoe import GenerateRequest, Sampling, Session

SAMPLE_EVERY = 20
WORDS = ("red", "green", "blue", "one", "two", "three", "open", "close", "left", "right", "north", "south", "east")


def anonymous_kib() -> int:
    """Anonymous memory of this process, swapped out or not."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Swap:")))


def main() -> int:
    model, *counts = sys.argv[1:]
    n_decisions, n_generates = (int(counts[i]) if len(counts) > i else n for i, n in ((0, 2000), (1, 200)))
    words = random.Random(1)
    seen: list[tuple[int, int]] = []
    firsts: dict[str, object] = {}
    wrong = 0
    with Session.open(model) as session:
        for index in range(n_decisions):
            session.decide(
                prefix=" ".join(words.choices(WORDS, k=words.randint(1, 60))), suffix="?", choices=["A", "b"]
            )
            if index % max(n_decisions // n_generates, 1) == 0:
                hot = Sampling(temperature=1.0, seed=3)
                turn = session.generate(GenerateRequest(prompt="Say a colour.", n_predict=8, sampling=hot))
                wrong += firsts.setdefault("generate", turn.text) != turn.text
                same = session.decide(prefix="The colour is ", suffix="red?", choices=["A", "b"])
                wrong += firsts.setdefault("decide", same.choice_logp) != same.choice_logp
            if index % SAMPLE_EVERY == 0:
                seen.append((index, anonymous_kib()))
    steady = [(index, kib) for index, kib in seen if index >= n_decisions // 2]
    slope = float(np.polyfit(*zip(*steady, strict=True), 1)[0])
    print(
        f"{n_decisions} decisions, {n_generates} generates: {slope:+.3f} KiB a decision, {steady[0][1] / 1024:.1f} to "
        f"{steady[-1][1] / 1024:.1f} MiB; {wrong} equal requests with other results"
    )
    return 1 if wrong or slope >= 1.0 else 0


if __name__ == "__main__":
    sys.exit(main())
