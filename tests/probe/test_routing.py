"""How concentrated routing is, and what caches would have served: against slow and plain ways to say the same."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest

from bmoe import Refused
from bmoe.probe.hits import Replay
from bmoe.probe.record import Routed
from bmoe.probe.routing import layer_uses
from bmoe.probe.summary import Summary
from tests.probe.made import random_record, record, routed


class TestUse:
    def test_the_hottest_experts_cover_most(self) -> None:
        counts = routed([[], [0, 10, 5, 5], [1, 1, 1, 1]])
        uses = layer_uses(counts.cnt, counts.n_expert)
        assert [(use.layer, use.n_expert, use.n_routings, use.used) for use in uses] == [(1, 4, 20, 0.75), (2, 4, 4, 1)]
        assert uses[0].hottest == (0.5, 0.5, 0.75)  # a tenth of 4 experts is one, and so is a quarter
        assert uses[1].hottest == (0.25, 0.25, 0.5)

    def test_parts_are_rounded_up_and_only_once(self) -> None:
        counts = routed([list(range(1, 21))])
        (use,) = layer_uses(counts.cnt, counts.n_expert)
        assert use.hottest == (39 / 210, 90 / 210, 155 / 210)

    def test_a_layer_that_routed_nothing(self) -> None:
        (use,) = layer_uses(np.zeros((1, 4), np.int64), np.array([4]))
        assert (use.used, use.hottest) == (0.0, (0.0, 0.0, 0.0))


def slow_lru(decisions: Sequence[Routed], room_mib: float) -> float:
    """An LRU cache that is asked for one expert at a time: of a layer's, those that were asked for latest first."""
    held: OrderedDict[tuple[int, int], float] = OrderedDict()
    asked_at: dict[tuple[int, int], int] = {}
    n_asked = n_hits = 0
    for one in decisions:
        for layer in range(len(one.nu)):
            asked = [(layer, int(expert)) for expert in np.flatnonzero(one.cnt[layer])]
            asked.sort(key=lambda key: -asked_at.get(key, -1))
            for key in asked:
                n_asked += 1
                n_hits += key in held
                held[key] = float(one.expert_mib[layer])
                held.move_to_end(key)
                asked_at[key] = n_asked
                while held and sum(held.values()) > room_mib + 1e-9:
                    held.popitem(last=False)
    return n_hits / n_asked


class TestHits:
    FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.0)

    @pytest.mark.parametrize("seed", range(3))
    def test_lru_is_what_a_cache_would_have_done(self, seed: int) -> None:
        made = [random_record(10 * seed + number, n_layer=6, n_expert=16).routed for number in range(12)]
        decisions = [one for one in made if one is not None]
        for one in decisions:  # experts of other sizes in other layers
            one.expert_mib[:] = np.where(one.n_expert > 0, [1.0, 2.5, 1.0, 0.3, 1.7, 4.0], 0)
        replay = Replay(decisions[0].n_expert.tolist(), decisions[0].expert_mib.tolist())
        for one in decisions:
            replay.add(one)
        rates = replay.rates(self.FRACTIONS)
        assert rates is not None
        for mib, rate in zip(rates.cache_mib, rates.lru, strict=True):
            # A depth says what LRU does where no expert is larger than the room, and evicts no more than it must.
            assert rate == pytest.approx(slow_lru(decisions, mib), abs=0.02 if 0 < mib < rates.all_mib else 0)
        assert list(rates.lru) == sorted(rates.lru)

    @pytest.mark.parametrize("seed", range(3))
    def test_lru_of_equal_experts_is_exact(self, seed: int) -> None:
        made = [random_record(10 * seed + number, n_layer=6, n_expert=16).routed for number in range(12)]
        decisions = [one for one in made if one is not None]
        replay = Replay(decisions[0].n_expert.tolist(), decisions[0].expert_mib.tolist())
        for one in decisions:
            replay.add(one)
        rates = replay.rates(self.FRACTIONS)
        assert rates is not None
        assert [*rates.lru] == [pytest.approx(slow_lru(decisions, mib), abs=1e-12) for mib in rates.cache_mib]
        assert 0 < rates.lru[4] < rates.lru[-1] < 1  # what is asked for the first time is never there

    def test_the_fixed_set_is_what_is_asked_for_most_often(self) -> None:
        replay = Replay([0, 3], [0.0, 2.0])
        for counts in ([5, 1, 0], [0, 9, 0], [0, 1, 1]):
            replay.add(routed([[], counts], expert_mib=2.0))
        rates = replay.rates((0.0, 0.3, 1 / 3, 0.5, 2 / 3, 1.0))
        assert rates is not None
        assert (rates.n_asked, rates.all_mib) == (5, 6.0)
        assert rates.fixed == (0, 0, 3 / 5, 3 / 5, 4 / 5, 1)  # asked for once per decision, however many tokens

    def test_nothing_asked_for(self) -> None:
        assert Replay([0, 2], [0.0, 1.0]).rates((0.5,)) is None


class TestSummary:
    def test_counts_add_up(self) -> None:
        total = Summary([record([[1, 2]], routed=routed([[3, 1]])), record([[1, 2]], routed=routed([[1, 5]]))])
        assert total.n_decisions == 2
        assert total.layer_uses[0].n_routings == 10
        np.testing.assert_allclose(total.usage, [[0.4, 0.6]])
        assert total.agreement is not None
        assert total.agreement.n_agree == (2,)

    def test_what_there_is_not_has_no_usage(self) -> None:
        usage = Summary([record(routed=routed([[], [1, 1, 2], [4]]))]).usage
        assert usage is not None
        np.testing.assert_array_equal(usage, [[np.nan] * 3, [0.25, 0.25, 0.5], [1, np.nan, np.nan]])

    def test_a_dense_model_and_none_at_all(self) -> None:
        for total in (Summary(), Summary([record([[1, 2]])])):
            assert (total.layer_uses, total.usage, total.hit_rates()) == ((), None, None)
        assert Summary([record()]).agreement is None

    @pytest.mark.parametrize(
        ("other", "why"),
        [
            (record([[1, 2], [1, 2]]), "with 1 and with 2 layers"),
            (record([[1, 2]], routed=routed([[1, 1, 1]])), "with other experts"),
            (record([[1, 2]], routed=routed([[1, 1]], expert_mib=2.0)), "with other experts"),
        ],
    )
    def test_other_models_do_not_add_up(self, other: object, why: str) -> None:
        total = Summary([record([[1, 2]], routed=routed([[1, 1]]))])
        with pytest.raises(Refused, match=why):
            total.add(other)  # type: ignore[arg-type]

    def test_the_first_decision_is_kept_as_it_was(self) -> None:
        first = record([[1, 2]], routed=routed([[3, 1]]))
        Summary([first, first])
        assert first.routed is not None
        assert first.routed.cnt.tolist() == [[3, 1]]
