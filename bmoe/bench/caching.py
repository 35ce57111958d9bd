"""What streaming costs where nothing has to be read: every expert is kept, beside the same model in memory."""

from collections.abc import Iterator, Sequence

from bmoe.bench import decisions
from bmoe.bench.plan import Stage
from bmoe.bench.prompts import Prompt
from bmoe.bench.report import Cached
from bmoe_native import Engine

ROUNDS = 7
MAX_FILLS = 5  # until a decision reads nothing: what was guessed first has to be read, too
NO_ROOM = "the model does not fit into memory"
GONE = "weights went out of memory again"


def beside_resident(streamed: Engine, resident: Engine, prompts: Sequence[Prompt], on_stage: Stage) -> Iterator[Cached]:
    """Each prompt by both in turn, after both have computed it. The streamed one keeps all experts."""
    for prompt in prompts:
        on_stage(f"with everything in memory: {prompt.name}")
        for _ in range(MAX_FILLS):
            _, spent = decisions.timed(streamed, prompt.tokens)
            if not spent.read_bytes:
                break
        decisions.timed(resident, prompt.tokens)
        rounds = [
            (decisions.timed(streamed, prompt.tokens), decisions.timed(resident, prompt.tokens)) for _ in range(ROUNDS)
        ]
        undisturbed = [
            (ours_s, theirs_s)
            for (ours_s, ours), (theirs_s, theirs) in rounds
            if not (ours.read_bytes or ours.n_misses or ours.n_major_faults or theirs.n_major_faults)
        ]
        if len(undisturbed) <= ROUNDS // 2:
            yield Cached(name=prompt.name, unmeasured_because=GONE)
            continue
        streamed_s, resident_s = zip(*undisturbed, strict=True)
        yield Cached(name=prompt.name, streamed_s=streamed_s, resident_s=resident_s)
