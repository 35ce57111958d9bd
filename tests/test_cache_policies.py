"""The replay of expert caches: bmoe's counts what the engine counts, the others do what they are named after."""

import dataclasses
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import cache_policies
from benchmarks.expert_caches import ByScore, Cache, Fixed, Graph, Layer, Lfu, Lru, Min, policies
from tests import tiny

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of each of two topics, in turn; a topic is eight letters."""
    folder = tmp_path_factory.mktemp("prompts")
    files = []
    for number, topic in itertools.product(range(2), repeat=2):
        letters = random.Random(f"{topic}/{number}").choices(LETTERS[8 * topic : 8 * topic + 8], k=90)
        files.append(folder / f"p90-{topic}-{number}.txt")
        files[-1].write_text(" ".join(letters))
    return files


@pytest.mark.parametrize("n_ubatch", [0, 32])
@pytest.mark.parametrize("arch", ["qwen3moe", "gemma4", "deepseek2", "lfm2moe"])
def test_the_replay_counts_what_the_engine_counts(
    arch: str, n_ubatch: int, prompts: list[Path], tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "m.gguf", arch=arch)
    layers, _ = cache_policies.record(model, prompts[:1], 0)
    total = sum(layer.n_experts * layer.expert_bytes for layer in layers)
    for share in (0.0, 0.15, 0.6, 1.0):
        _, decisions = cache_policies.record(model, prompts, int(share * total), n_ubatch)
        assert (sum(decision.spent.n_hits for decision in decisions) > 0) == (share > 0)
        cache_policies.check(layers, decisions, int(share * total))
        cache = ByScore(layers, int(share * total))
        for decision in decisions:
            cache_policies.run(cache, decision.graphs)
        routed = sum(decision.spent.routed_bytes for decision in decisions)
        assert cache.routed_bytes == pytest.approx(routed, rel=1e-4)  # a scale of gemma4's is resident
        assert {len(decision.graphs) for decision in decisions} == ({1} if n_ubatch == 0 else {6})


def test_a_replay_that_counts_otherwise_is_an_error(prompts: list[Path], tmp_path: Path) -> None:
    layers, decisions = cache_policies.record(tiny.write(tmp_path / "m.gguf", arch="qwen3moe"), prompts, 0)
    spent = dataclasses.replace(decisions[2].spent, n_hits=1)
    decisions[2] = dataclasses.replace(decisions[2], spent=spent)
    with pytest.raises(SystemExit, match=r"decision 2: hits and misses are \(1, .*\), and \(0, "):
        cache_policies.check(layers, decisions, 0)


def drawn(seed: int, n_graphs: int, n_layers: int, n_experts: int) -> list[Graph]:
    """Graphs of a few topics; some experts are liked far more than others."""
    draw = random.Random(seed)
    topics = [[[draw.random() ** 3 for _ in range(n_experts)] for _ in range(n_layers)] for _ in range(3)]
    return [
        [(layer, Counter(draw.choices(range(n_experts), liked, k=8))) for layer, liked in enumerate(topic)]
        for topic in draw.choices(topics, k=n_graphs)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_exceeds_its_budget_or_reads_less_than_min(seed: int) -> None:
    layers = [Layer(12, 1000)] * 4
    graphs = drawn(seed, 40, 4, 12)
    for budget in (0, 5500, 9000, 20_000, 48_000):
        read = {}
        for name, cache in policies(layers, budget, graphs, 0):
            before = cache.resident_bytes  # of the fixed set, which was never read
            for graph in graphs:
                cache.run(graph)
                assert cache.resident_bytes == 1000 * sum(map(len, cache.resident)) <= budget
            read[name] = cache.read_bytes + before
            assert cache.hits + cache.misses == sum(len(uses) for graph in graphs for _, uses in graph)
        assert len(read) == 11
        assert min(read.values()) == read["MIN, hindsight"]
        equal = [n_bytes for name, n_bytes in read.items() if "equal shares" in name or name == "bmoe"]
        assert min(equal) == read["MIN, equal shares, hindsight"]


def least(layers: list[Layer], graphs: list[Graph], n_kept: int) -> int:
    """Misses of the best that could be done, found by trying everything."""
    states = {frozenset[tuple[int, int]](): 0}
    for layer, uses in (ask for graph in graphs for ask in graph):
        asked = frozenset((layer, expert) for expert in uses)
        after: dict[frozenset[tuple[int, int]], int] = {}
        for resident, misses in states.items():
            union = resident | asked
            for kept in itertools.combinations(sorted(union), min(n_kept, len(union))):
                key = frozenset(kept)
                after[key] = min(after.get(key, 1 << 30), misses + len(asked - resident))
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(5))
def test_min_and_the_fixed_set_are_the_best_of_all(seed: int) -> None:
    layers = [Layer(4, 10)] * 2
    draw = random.Random(seed)
    graphs: list[Graph] = [
        [(layer, Counter(draw.sample(range(4), draw.randint(1, 3)))) for layer in range(2)] for _ in range(6)
    ]
    best = Min(layers, 30, graphs, equal_shares=False)
    cache_policies.run(best, graphs)
    assert best.misses == least(layers, graphs, 3)
    fixed = Fixed(layers, 30, graphs)
    cache_policies.run(fixed, graphs)
    asked = Counter((layer, expert) for graph in graphs for layer, uses in graph for expert in uses)
    assert fixed.hits == max(
        sum(asked[at] for at in kept) for kept in itertools.combinations(itertools.product(range(2), range(4)), 3)
    )


def hits_of(cache: Cache, graphs: list[Graph]) -> int:
    cache_policies.run(cache, graphs)
    return cache.hits


def test_one_list_for_a_walk_in_a_circle_never_hits_and_shares_do() -> None:
    layers = [Layer(4, 10)] * 5
    circle: list[Graph] = [[(layer, Counter([0, 1])) for layer in range(5)]] * 10
    assert hits_of(Lru(layers, 80, equal_shares=False), circle) == 0  # eight of the ten that are asked for
    assert hits_of(Lru(layers, 80, equal_shares=True), circle) == 9 * 8
    assert hits_of(ByScore(layers, 80), circle) == 9 * 8
    assert hits_of(Lru(layers, 100, equal_shares=False), circle) == 9 * 10


def test_what_each_policy_keeps() -> None:
    layers = [Layer(4, 10)]
    asks: list[Graph] = [[(0, Counter({0: 9}))], [(0, Counter({1: 1}))], [(0, Counter({1: 1}))]]

    def kept(cache: Cache, *more: Graph) -> set[int]:
        cache_policies.run(cache, [*asks, *more])
        return cache.resident[0]

    assert kept(Lru(layers, 20, equal_shares=True), [(0, Counter({2: 1}))]) == {1, 2}
    assert kept(Lru(layers, 10, equal_shares=True), [(0, Counter({2: 2, 3: 1}))]) == {3}
    assert kept(Lru(layers, 10, equal_shares=True, busiest_last=True), [(0, Counter({2: 2, 3: 1}))]) == {2}
    assert kept(Lfu(layers, 10, equal_shares=False), [(0, Counter({2: 1}))]) == {1}
    assert kept(Lfu(layers, 10, equal_shares=False, by_tokens=True), [(0, Counter({2: 1}))]) == {0}
    assert kept(ByScore(layers, 10)) == {0}  # 4 doublings, of which 64 % are left, against 1 + 80 %
    assert kept(ByScore(layers, 10), *asks[1:] * 2) == {1}


def test_decisions_that_count_have_their_topic_before_them(prompts: list[Path], tmp_path: Path) -> None:
    _, decisions = cache_policies.record(tiny.write(tmp_path / "m.gguf", arch="qwen3moe"), prompts, 0)
    topics = [[one for one in decisions if one.topic == topic] for topic in range(2)]
    order = {
        title: [([(one.topic, one.number) for one in some], n_first) for some, n_first in arranged(topics)]
        for title, arranged in cache_policies.SEQUENCES.items()
    }
    assert order == {
        "one topic": [([(0, 0), (0, 1)], 1), ([(1, 0), (1, 1)], 1)],
        "topic after topic": [([(0, 0), (0, 1), (1, 0), (1, 1)], 1)],
        "two topics in turn": [([(0, 0), (1, 0), (0, 1), (1, 1)], 2)],
        "all topics in turn": [([(0, 0), (1, 0), (0, 1), (1, 1)], 2)],
    }


def test_only_what_counts_is_counted(prompts: list[Path], tmp_path: Path) -> None:
    _, decisions = cache_policies.record(tiny.write(tmp_path / "m.gguf", arch="qwen3moe"), prompts, 0)
    asked = ({0: 1, 1: 1}, {0: 2, 2: 1}, {0: 1, 3: 1})
    made = [dataclasses.replace(decisions[0], graphs=([(layer, uses) for layer in range(2)],)) for uses in asked]

    def read(budget: int) -> tuple[float, ...]:
        shares = cache_policies.replayed([Layer(4, 10), Layer(4, 30)], [(made, 1), (made[:1] * 2, 1)], budget)
        return tuple(round(shares[name], 3) for name in ("bmoe", "LRU, equal shares", "best fixed set, hindsight"))

    assert read(0) == (1, 1, 1)
    assert read(40) == (0.5, 0.833, 0.583)  # by hand: 120, 200 and 140 of 240 bytes
    assert read(160) == (0.333, 0.333, 0)
