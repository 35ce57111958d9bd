"""What bmoe's expert cache reads, beside other policies, on what a model really routes prompts to.

    python -m benchmarks.cache_policies MODEL PROMPTS [--cache-mb N]

PROMPTS is a folder that make_moe.py wrote. Each prompt is decided once, streamed with this cache, and its routing
recorded; the replay of bmoe's own policy must count what the engine counted. Printed are the share of a layer's experts
that a prompt touches, how much of a prompt's expert bytes another has read before it, what managing the cache cost,
and for sequences of these prompts and budgets the share of the bytes routed to that each policy reads.
"""

import argparse
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.expert_caches import ByScore, Cache, Graph, Layer, policies
from bmoe_native import Engine, PrefillResult, Routing, Streaming

BUDGETS_PCT = (5.0, 10.0, 17.0, 34.0, 50.0)


@dataclass(frozen=True, slots=True)
class Decision:
    topic: int
    number: int  # of its topic
    n_tokens: int
    graphs: tuple[Graph, ...]
    spent: PrefillResult


class Recorder:
    """Hears routers. Layers are numbered by the order in which they are first heard."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.graphs: list[list[tuple[int, Counter[int]]]] = []
        self._last = -1

    def hear(self, routing: Routing) -> None:
        self.layers.setdefault(routing.layer, Layer(routing.n_expert, routing.expert_bytes))
        if not self.graphs or routing.layer <= self._last:
            self.graphs.append([])
        self._last = routing.layer
        index = list(self.layers).index(routing.layer)
        self.graphs[-1].append((index, Counter(routing.experts.ravel().tolist())))

    def taken(self) -> tuple[Graph, ...]:
        graphs, self.graphs = self.graphs, []
        return tuple(graphs)


def record(
    model: Path, files: Sequence[Path], cache_bytes: int, n_ubatch: int = 0
) -> tuple[list[Layer], list[Decision]]:
    """What the prompts are routed to, decided in this order; and what the engine says that it cost."""
    recorder = Recorder()
    decisions = []
    streaming = Streaming(cache_bytes=cache_bytes, prefetch="off")  # what is read ahead counts as missing
    with Engine.open(model, n_ubatch=n_ubatch, streaming=streaming, on_routing=recorder.hear) as engine:
        for file in files:
            tokens = engine.text_tokens(file.read_text(), add_bos=True)
            engine.drop_state()
            spent = engine.prefill(tokens)
            topic, number = map(int, file.stem.split("-")[1:])
            decisions.append(Decision(topic, number, len(tokens), recorder.taken(), spent))
    return list(recorder.layers.values()), decisions


def check(layers: Sequence[Layer], decisions: Sequence[Decision], cache_bytes: int) -> None:
    """Raises: SystemExit, where the replay of bmoe's policy is not what the engine did."""
    cache = ByScore(layers, cache_bytes)
    for index, decision in enumerate(decisions):
        hits, misses = cache.hits, cache.misses
        for graph in decision.graphs:
            cache.run(graph)
        counted, replayed = (decision.spent.n_hits, decision.spent.n_misses), (cache.hits - hits, cache.misses - misses)
        if counted != replayed:
            raise SystemExit(f"decision {index}: hits and misses are {counted}, and {replayed} in the replay")


# What prompts have in common.


def touched(decision: Decision) -> list[set[int]]:
    """The experts of each layer that any token of a decision is routed to."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for graph in decision.graphs:
        for layer, uses in graph:
            found[layer] |= uses.keys()
    return [found[layer] for layer in sorted(found)]


def reused(layers: Sequence[Layer], first: Sequence[set[int]], second: Sequence[set[int]]) -> float:
    """The share of the second decision's expert bytes that the first had read."""

    def n_bytes(sets: Iterator[set[int]]) -> int:
        return sum(len(experts) * layer.expert_bytes for layer, experts in zip(layers, sets, strict=False))

    return n_bytes(one & other for one, other in zip(first, second, strict=True)) / n_bytes(iter(second))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def overlaps(layers: Sequence[Layer], decisions: Sequence[Decision]) -> Iterator[str]:
    """Lines for the decisions of one length. The last layer, which computes the last token only, is no part of them."""
    sets = [touched(decision)[:-1] for decision in decisions]
    parts = [[len(experts) / layer.n_experts for layer, experts in zip(layers, one, strict=False)] for one in sets]
    by_prompt, by_layer = [mean(one) for one in parts], [mean(one) for one in zip(*parts, strict=True)]
    yield (
        f"{decisions[0].n_tokens} tokens: {100 * mean(by_prompt):.1f} % of a layer's experts, by prompt "
        f"{100 * min(by_prompt):.1f} to {100 * max(by_prompt):.1f}, by layer "
        f"{100 * min(by_layer):.1f} to {100 * max(by_layer):.1f}; "
        f"{mean([decision.spent.routed_bytes for decision in decisions]) / 2**20:.0f} MiB a prompt"
    )
    for what, is_same in (("the same topic", True), ("another topic", False)):
        values = [
            reused(layers, sets[i], sets[j])
            for i, j in itertools.permutations(range(len(sets)), 2)
            if (decisions[i].topic == decisions[j].topic) == is_same
        ]
        if values:
            yield (
                f"  read before by a prompt of {what}: {100 * mean(values):.1f} % "
                f"({100 * min(values):.1f} to {100 * max(values):.1f})"
            )


def management(decisions: Sequence[Decision]) -> str:
    spent = [decision.spent for decision in decisions]
    mgmt = sum(one.mgmt_s for one in spent)
    wall, cpu = sum(one.prefill_s for one in spent), sum(one.prefill_cpu_s for one in spent)
    return f"  managing the cache: {100 * mgmt / wall:.2f} % of the time, and {100 * mgmt / cpu:.2f} % of CPU time"


# Sequences, and what each policy reads in them.

Sequences = list[tuple[list[Decision], int]]  # each with the number of its first decisions, which are not counted


def one_topic(topics: Sequence[list[Decision]]) -> Sequences:
    return [(topic, 1) for topic in topics]


def topic_after_topic(topics: Sequence[list[Decision]]) -> Sequences:
    return [(list(itertools.chain(*topics)), 1)]


def two_in_turn(topics: Sequence[list[Decision]]) -> Sequences:
    return [(in_turn(topics[at : at + 2]), 2) for at in range(0, len(topics) - 1, 2)]


def all_in_turn(topics: Sequence[list[Decision]]) -> Sequences:
    return [(in_turn(topics), len(topics))]


def in_turn(topics: Sequence[list[Decision]]) -> list[Decision]:
    return list(itertools.chain(*zip(*topics, strict=False)))


SEQUENCES: dict[str, Callable[[Sequence[list[Decision]]], Sequences]] = {
    "one topic": one_topic,
    "topic after topic": topic_after_topic,
    "two topics in turn": two_in_turn,
    "all topics in turn": all_in_turn,
}


def replayed(layers: Sequence[Layer], sequences: Sequences, budget: int) -> dict[str, float]:
    """By policy, the share of bytes routed to that it reads in the decisions that count, of all sequences together."""
    routed: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for decisions, n_first in sequences:
        first = [graph for decision in decisions[:n_first] for graph in decision.graphs]
        counted = [graph for decision in decisions[n_first:] for graph in decision.graphs]
        for name, cache in policies(layers, budget, first + counted, len(first)):
            run(cache, first)
            routed_before, read_before = cache.routed_bytes, cache.read_bytes
            run(cache, counted)
            routed[name] += cache.routed_bytes - routed_before
            read[name] += cache.read_bytes - read_before
    return {name: read[name] / routed[name] for name in routed}


def run(cache: Cache, graphs: Sequence[Graph]) -> None:
    for graph in graphs:
        cache.run(graph)


def tables(layers: Sequence[Layer], decisions: Sequence[Decision]) -> Iterator[str]:
    """Of the decisions of one length."""
    total = sum(layer.n_experts * layer.expert_bytes for layer in layers)
    by_topic: defaultdict[int, list[Decision]] = defaultdict(list)
    for decision in sorted(decisions, key=lambda one: (one.topic, one.number)):
        by_topic[decision.topic].append(decision)
    for title, arranged in SEQUENCES.items():
        sequences = arranged(list(by_topic.values()))
        n_counted = sum(len(one) - n_first for one, n_first in sequences)
        if n_counted < 1:
            continue
        yield f"\n{decisions[0].n_tokens} tokens, {title}: {n_counted} decisions\n"
        yield "| % read with a cache of | " + " | ".join(f"{budget:g} %" for budget in BUDGETS_PCT) + " |"
        yield "| --- |" + " ---: |" * len(BUDGETS_PCT)
        columns = [replayed(layers, sequences, int(budget / 100 * total)) for budget in BUDGETS_PCT]
        for name in columns[0]:
            yield f"| {name} | " + " | ".join(f"{100 * column[name]:.1f}" for column in columns) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, help="folder of p<tokens>-<topic>-<number>.txt")
    parser.add_argument("--cache-mb", type=float, default=1500, help="MiB of experts kept while routing is recorded")
    options = parser.parse_args(arguments)
    files = sorted(options.prompts.glob("p*-*-*.txt"), key=lambda file: (file.stem.split("-")[2], file.stem))
    if not files:
        parser.error(f"{options.prompts} holds no prompts of make_moe.py")
    cache_bytes = int(options.cache_mb * 2**20)
    layers, decisions = record(options.model, files, cache_bytes)
    report(layers, decisions, cache_bytes)


def report(layers: Sequence[Layer], decisions: Sequence[Decision], cache_bytes: int) -> None:
    check(layers, decisions, cache_bytes)
    total = sum(layer.n_experts * layer.expert_bytes for layer in layers)
    print(
        f"{len(layers)} layers, {total / 2**20:.0f} MiB of experts; recorded with {cache_bytes / 2**20:g} MiB of cache"
    )
    print(f"the replay counts the hits and misses of the engine in all {len(decisions)} decisions")
    lengths = sorted({decision.n_tokens for decision in decisions})
    of_length = [[decision for decision in decisions if decision.n_tokens == length] for length in lengths]
    for some in of_length:
        print(*overlaps(layers, some), management(some), sep="\n", flush=True)
    for some in of_length:
        for line in tables(layers, some):
            print(line, flush=True)


if __name__ == "__main__":
    main()
