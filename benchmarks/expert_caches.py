"""Policies of an expert cache in plain Python, for replaying what routers asked for.

A layer's experts are asked for together. What is there already is a hit, the rest is read; then what the policy ranks
lowest is given back, until the budget is kept. Meanwhile the layer has all that it asked for, whatever the budget: a
layer must be computed. `ByScore` is the policy of csrc/experts/store.cpp, and a test holds the two together.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

USE = 256  # what a use adds to a score for each doubling of its tokens


@dataclass(frozen=True, slots=True)
class Layer:
    n_experts: int
    expert_bytes: int


Uses = Mapping[int, int]  # expert → tokens that were routed to it
Graph = Sequence[tuple[int, Uses]]  # what each layer, by index, asked for, in order


def shares(layers: Sequence[Layer], budget: int) -> list[int]:
    """How many experts each layer keeps where all keep the same share; what is left goes to the first."""
    total = sum(layer.n_experts * layer.expert_bytes for layer in layers)
    quotas = [int(min(budget / total, 1.0) * layer.n_experts) for layer in layers]
    left = budget - sum(quota * layer.expert_bytes for quota, layer in zip(quotas, layers, strict=True))
    for index, layer in enumerate(layers):
        if quotas[index] < layer.n_experts and layer.expert_bytes <= left:
            quotas[index] += 1
            left -= layer.expert_bytes
    return quotas


class Cache(ABC):
    """What is in memory, and what has been counted. `rank` is all that a policy is; the highest stay."""

    def __init__(self, layers: Sequence[Layer], budget: int, *, equal_shares: bool) -> None:
        self.layers = layers
        self.budget = budget
        self.quotas = shares(layers, budget) if equal_shares else None
        self.resident: list[set[int]] = [set() for _ in layers]
        self.ranked: list[list[int]] = [[] for _ in layers]  # what is resident, the lowest last
        self.resident_bytes = 0
        self.hits = self.misses = self.routed_bytes = self.read_bytes = 0
        self.n_graphs = self.n_asks = 0

    @abstractmethod
    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        """Of an expert that is in memory; no two are equal in one layer, and they change as their layer asks."""

    @abstractmethod
    def note(self, layer: int, uses: Uses) -> None:
        """Remember what ranks are made of."""

    def run(self, graph: Graph) -> None:
        self.n_graphs += 1
        for layer, uses in graph:
            self.ask(layer, uses)

    def ask(self, layer: int, uses: Uses) -> None:
        size = self.layers[layer].expert_bytes
        missing = uses.keys() - self.resident[layer]
        self.misses += len(missing)
        self.hits += len(uses) - len(missing)
        self.routed_bytes += len(uses) * size
        self.read_bytes += len(missing) * size
        self.resident[layer] |= missing
        self.resident_bytes += len(missing) * size
        self.n_asks += 1
        self.note(layer, uses)
        self.trim(layer)

    def trim(self, layer: int) -> None:
        ranked = sorted(self.resident[layer], key=lambda expert: self.rank(layer, expert), reverse=True)
        self.ranked[layer] = ranked
        if self.quotas is not None:
            while len(ranked) > self.quotas[layer]:
                self.give_back(layer, ranked.pop())
        elif self.resident_bytes > self.budget:
            lowest = [(self.rank(one, experts[-1]), one) for one, experts in enumerate(self.ranked) if experts]
            heapify(lowest)
            while self.resident_bytes > self.budget:
                _, one = heappop(lowest)
                self.give_back(one, self.ranked[one].pop())
                if self.ranked[one]:
                    heappush(lowest, (self.rank(one, self.ranked[one][-1]), one))

    def give_back(self, layer: int, expert: int) -> None:
        self.resident[layer].remove(expert)
        self.resident_bytes -= self.layers[layer].expert_bytes


class ByScore(Cache):
    """bmoe's: uses weighted by the logarithm of their tokens, a fifth of the sum lost in each graph."""

    def __init__(self, layers: Sequence[Layer], budget: int, *, equal_shares: bool = True) -> None:
        super().__init__(layers, budget, equal_shares=equal_shares)
        self.score = [[0] * layer.n_experts for layer in layers]
        self.used_at = [[0] * layer.n_experts for layer in layers]

    def note(self, layer: int, uses: Uses) -> None:
        score = self.score[layer] = [value - value // 5 for value in self.score[layer]]
        for expert, n_tokens in uses.items():
            score[expert] += USE * n_tokens.bit_length()
            self.used_at[layer][expert] = self.n_graphs

    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        return self.score[layer][expert], self.used_at[layer][expert], -expert


class Lru(Cache):
    """The least recently used goes first. Of one ask, experts are used in rising order, or the busiest last."""

    def __init__(self, layers: Sequence[Layer], budget: int, *, equal_shares: bool, busiest_last: bool = False) -> None:
        super().__init__(layers, budget, equal_shares=equal_shares)
        self.busiest_last = busiest_last
        self.used: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, layer: int, uses: Uses) -> None:
        for expert, n_tokens in uses.items():
            self.used[layer, expert] = self.n_asks, n_tokens if self.busiest_last else 0

    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        return *self.used[layer, expert], expert


class Lfu(Cache):
    """The least frequently used goes first, of those the least recently used; nothing is ever forgotten."""

    def __init__(self, layers: Sequence[Layer], budget: int, *, equal_shares: bool, by_tokens: bool = False) -> None:
        super().__init__(layers, budget, equal_shares=equal_shares)
        self.by_tokens = by_tokens
        self.n_uses: Counter[tuple[int, int]] = Counter()
        self.used_at: dict[tuple[int, int], int] = {}

    def note(self, layer: int, uses: Uses) -> None:
        for expert, n_tokens in uses.items():
            self.n_uses[layer, expert] += n_tokens if self.by_tokens else 1
            self.used_at[layer, expert] = self.n_asks

    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        return self.n_uses[layer, expert], self.used_at[layer, expert], expert


class Fixed(Cache):
    """With hindsight, the experts that the graphs ask for most often, in memory from the beginning to the end.

    Filled by number of asks while there is room. Experts differ little in size: no other set hits much more.
    """

    def __init__(self, layers: Sequence[Layer], budget: int, graphs: Sequence[Graph]) -> None:
        super().__init__(layers, budget, equal_shares=False)
        asked = Counter((layer, expert) for graph in graphs for layer, uses in graph for expert in sorted(uses))
        self.kept: set[tuple[int, int]] = set()
        for layer, expert in sorted(asked, key=lambda at: (-asked[at], at)):
            size = layers[layer].expert_bytes
            if self.resident_bytes + size <= budget:
                self.resident[layer].add(expert)
                self.resident_bytes += size
                self.kept.add((layer, expert))
        self.ranked = [sorted(experts) for experts in self.resident]

    def note(self, layer: int, uses: Uses) -> None:
        pass

    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        return (layer, expert) in self.kept, -expert


class Min(Cache):
    """Belady's: what is asked for latest of all goes first. The least that can be read, were experts of one size."""

    def __init__(self, layers: Sequence[Layer], budget: int, graphs: Sequence[Graph], *, equal_shares: bool) -> None:
        super().__init__(layers, budget, equal_shares=equal_shares)
        asks = [ask for graph in graphs for ask in graph]
        upcoming: dict[tuple[int, int], int] = {}
        self.next_ask: list[dict[int, int]] = []  # of each expert of each ask, from the last ask to the first
        for index in range(len(asks) - 1, -1, -1):
            layer, uses = asks[index]
            self.next_ask.append({expert: upcoming.get((layer, expert), len(asks)) for expert in uses})
            upcoming.update({(layer, expert): index for expert in uses})
        self.when: dict[tuple[int, int], int] = {}

    def note(self, layer: int, uses: Uses) -> None:
        self.when.update({(layer, expert): at for expert, at in self.next_ask.pop().items()})

    def rank(self, layer: int, expert: int) -> tuple[float, ...]:
        return -self.when[layer, expert], expert


def policies(
    layers: Sequence[Layer], budget: int, graphs: Sequence[Graph], n_first: int
) -> Iterator[tuple[str, Cache]]:
    """All of them, by what they are called. The fixed set is chosen for the graphs after the first n_first."""
    yield "bmoe", ByScore(layers, budget)
    yield "bmoe's score, all layers together", ByScore(layers, budget, equal_shares=False)
    yield "LRU, all layers together", Lru(layers, budget, equal_shares=False)
    yield "LRU, equal shares", Lru(layers, budget, equal_shares=True)
    yield "LRU, equal shares, busiest last", Lru(layers, budget, equal_shares=True, busiest_last=True)
    yield "LFU, all layers together", Lfu(layers, budget, equal_shares=False)
    yield "LFU by tokens, all layers together", Lfu(layers, budget, equal_shares=False, by_tokens=True)
    yield "LFU by tokens, equal shares", Lfu(layers, budget, equal_shares=True, by_tokens=True)
    yield "best fixed set, hindsight", Fixed(layers, budget, graphs[n_first:])
    yield "MIN, equal shares, hindsight", Min(layers, budget, graphs, equal_shares=True)
    yield "MIN, hindsight", Min(layers, budget, graphs, equal_shares=False)
