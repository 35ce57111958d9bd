from bmoe.decide import Decider, DecideRequest, KeptPrefix
from bmoe.decide.perplexity import Perplexity, PerplexityRequest
from bmoe.decide.prefix import MIB
from bmoe.decide.reads import Reads
from tests.decide.scripted import Outcome, ScriptedBackend
from tests.fakes import ScriptedEngine

READS = {
    "read_bytes": 3 * MIB,
    "routed_bytes": 5 * MIB,
    "ahead_bytes": 2 * MIB,
    "wasted_bytes": MIB,
    "n_hits": 3,
    "n_misses": 1,
    "io_s": 0.5,
    "stall_s": 0.25,
    "mgmt_s": 0.125,
    "dev_tokens": 64,
    "dev_read_bytes": 7 * MIB,
    "dev_stall_s": 0.375,
    "dev_routed": 9,
    "dev_demand": 4,
    "dev_nodes": 50,
}
ONCE = {
    "prefill_read_mib": 3.0,
    "prefill_io_s": 0.5,
    "prefill_stall_s": 0.25,
    "prefill_mgmt_s": 0.125,
    "prefill_routed_mib": 5.0,
    "prefill_ahead_mib": 2.0,
    "prefill_wasted_mib": 1.0,
    "prefill_dev_tokens": 64,
    "prefill_dev_read_mib": 7.0,
    "prefill_dev_stall_s": 0.375,
    "prefill_dev_routed": 9,
    "prefill_dev_demand": 4,
    "prefill_dev_nodes": 50,
}
REQUEST = DecideRequest(prefix="One prefix. ", suffix="Which one?", choices=("A", "B"))


def test_prefills_add_up() -> None:
    reads = Reads()
    reads.add(Outcome(cancelled=False, n_tokens=1, **READS))
    assert reads.of_prefill() == ONCE
    assert reads.cache_hit_pct == 75.0
    reads.add(Outcome(cancelled=True, n_tokens=0, n_misses=4, io_s=1.0))
    assert reads.cache_hit_pct == 37.5
    assert reads.of_prefill() == {**ONCE, "prefill_io_s": 1.5}


def test_nothing_is_no_share() -> None:
    assert Reads().cache_hit_pct == 0.0
    assert set(Reads().of_prefill().values()) == {0.0}


def test_a_decision_tells_of_both_its_pieces() -> None:
    backend = ScriptedBackend()
    backend.reads = READS
    result = Decider(backend, kept=KeptPrefix(), clock=lambda: 0.0).decide(REQUEST)
    assert backend.n_prefills == 2
    assert {key: getattr(result, key) for key in ONCE} == {key: 2 * value for key, value in ONCE.items()}
    assert result.cache_hit_pct == 75.0


def test_where_nothing_streams_all_is_0() -> None:
    result = Decider(ScriptedBackend(), kept=None, clock=lambda: 0.0).decide(REQUEST)
    assert {getattr(result, key) for key in (*ONCE, "cache_hit_pct")} == {0.0}


def test_a_scored_text_tells_of_all_its_pieces() -> None:
    engine = ScriptedEngine()
    engine.reads = READS
    result = Perplexity(engine).score(PerplexityRequest(text="one two three. " * 12, window=20, stride=10))
    assert engine.n_prefills > 2
    assert result.prefill_read_mib == 3.0 * engine.n_prefills
    assert result.prefill_dev_tokens == 64 * engine.n_prefills
    assert result.prefill_dev_nodes == 50 * engine.n_prefills
    assert result.cache_hit_pct == 75.0
