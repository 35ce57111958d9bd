"""The probe over real engines: its lens is the decision, its counts are the prompt's tokens, and it changes no bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bmoe import DecideResult, GenerateRequest, Refused, Session
from bmoe.probe import Probe, ProbeFile, Record, read
from bmoe.probe.lens import lens
from bmoe.probe.record import Float32Array
from bmoe_native.errors import UnsupportedError
from bmoe_native.types import Streaming
from tests import tiny

MIB = 2**20
CHOICES = ("a", "b", "k", "t")
ASK: dict[str, Any] = {
    "prefix": "a question of some length, so that experts are asked for. " * 3,
    "suffix": "b?",
    "choices": CHOICES,
}
MOE = [arch for arch in tiny.FAMILIES if arch not in ("llama", "gemma3", "mamba")]
CUT_LAST = {"qwen3moe", "qwen3moe-split", "deepseek2", "lfm2moe", "granitehybrid"}
WEIGHT_SUM = {"deepseek2": 1.5}  # of a token's experts, where that is not 1: its file scales them
WAYS = {
    "resident": {},
    "streamed": {"streaming": Streaming(cache_bytes=MIB)},
    "no cache": {"streaming": Streaming(cache_bytes=0, prefetch="off")},
}


def probed(path: Path, *requests: dict[str, Any], **options: Any) -> tuple[list[Record], list[DecideResult]]:
    records: list[Record] = []
    with Session.open(path, **{"n_threads": 1, "repack": False, "probe": Probe(records.append), **options}) as session:
        results = [session.decide(**request) for request in requests or (ASK,)]
    return records, results


class TestLens:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("arch", tiny.FAMILIES)
    def test_the_last_layer_is_the_decision(self, arch: str, way: str, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        (record,), (result,) = probed(path, **WAYS[way])
        assert record.lens is not None, record.lens_why
        assert record.lens.shape == (tiny.FAMILIES[arch].n_layer, len(CHOICES))
        assert np.ptp(record.lens[-1] - record.logp) < 1e-3
        assert np.ptp(record.lens[0] - record.logp) > 0.1  # an earlier layer says something else
        assert (record.best, tuple(record.logp)) == (result.best, result.choice_logp)

    @pytest.mark.model
    def test_with_quantized_heads_too(self, named_models: list[Path]) -> None:
        """Q4_1, Q6_K and Q8_0, two of them tied to the embeddings."""
        assert named_models
        for path in named_models:
            (record,), _ = probed(path, {**ASK, "template": False}, n_ctx=512, n_threads=2, repack=True)
            assert record.lens is not None, record.lens_why
            assert np.ptp(record.lens[-1] - record.logp) < 1e-3
            assert np.ptp(record.lens[2] - record.logp) > 0.1

    @pytest.mark.parametrize("arch", tiny.FAMILIES)
    def test_each_layer_is_what_numpy_makes_of_its_state_by_the_file(self, arch: str, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        records: list[Record] = []
        probe = Probe(records.append)
        with Session.open(path, probe=probe) as session:
            session.decide(**ASK)
            tokens = [session._engine.text_tokens(choice, add_bos=False)[0] for choice in CHOICES]
        family = tiny.FAMILIES[arch]
        files = sorted(tmp_path.glob("*.gguf"))
        tensors = {tensor.name: tensor.data for file in files for tensor in gguf.GGUFReader(file).tensors}
        for layer, state in probe._states.items():
            x = state.astype(np.float64)
            normed = x / np.sqrt((x * x).mean() + 1e-6) * tensors[f"{family.output_norm}.weight"]
            logits = tensors["output.weight"][tokens].astype(np.float64) @ normed
            logits /= family.metadata.get("logit_scale", 1.0)
            if cap := family.metadata.get("final_logit_softcapping"):
                logits = cap * np.tanh(logits / cap)
            assert records[0].lens is not None
            np.testing.assert_allclose(records[0].lens[layer], logits, rtol=0, atol=1e-4)
        assert sorted(probe._states) == list(range(family.n_layer))

    def test_each_layer_of_one_token_is_what_numpy_computes_from_the_file_alone(self, tmp_path: Path) -> None:
        """A whole forward pass: the one token attends to itself alone, so that attention hands on its value."""
        path = tiny.write(tmp_path / "m.gguf")
        (record,), (result,) = probed(path, {"prefix": "h", "choices": CHOICES, "template": False})
        assert result.n_tokens == 1
        with Session.open(path) as session:
            (token,) = session._engine.text_tokens("h", add_bos=False)
            rows = [session._engine.text_tokens(choice, add_bos=False)[0] for choice in CHOICES]
        weights = {tensor.name: tensor.data.astype(np.float64) for tensor in gguf.GGUFReader(path).tensors}
        x = weights["token_embd.weight"][token]

        def normed(by: str) -> Any:
            return x / np.sqrt((x * x).mean() + 1e-6) * weights[f"{by}.weight"]

        assert record.lens is not None
        for layer, row in enumerate(record.lens):
            w = {name.split(".")[2]: weight for name, weight in weights.items() if name.startswith(f"blk.{layer}.")}
            value = (w["attn_v"] @ normed(f"blk.{layer}.attn_norm")).astype(np.float16).astype(np.float64)
            head = len(weights["output_norm.weight"]) // 4
            heads = np.repeat(value.reshape(-1, head), len(w["attn_q"]) // len(value), axis=0).ravel()
            x = x + w["attn_output"] @ heads
            h = normed(f"blk.{layer}.ffn_norm")
            gate = w["ffn_gate"] @ h
            x = x + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ h))
            np.testing.assert_allclose(row, weights["output.weight"][rows] @ normed("output_norm"), rtol=0, atol=1e-4)

    def test_it_is_of_the_last_token_whatever_the_pieces(self, tmp_path: Path) -> None:
        """A kept prefix and a narrow ubatch: several graphs and several prefills before the one that counts."""
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        for options in ({"n_ubatch": 16, "prefix_cache": "on"}, {"n_ubatch": 16, "prefix_cache": "off"}):
            records, _ = probed(path, ASK, {**ASK, "suffix": "k?"}, **options)
            for record in records:
                assert record.lens is not None
                assert np.ptp(record.lens[-1] - record.logp) < 1e-3


class Scripted:
    """An engine whose head says what it is told to."""

    def __init__(self, made: Any, logits: Any) -> None:
        self.made, self.row = made, logits

    def logits(self) -> Float32Array:
        return np.array(self.row, np.float32)

    def head_logits(self, states: Float32Array, tokens: Any) -> Float32Array:
        if isinstance(self.made, Exception):
            raise self.made
        return np.array(self.made, np.float32)


class TestNoLens:
    """Never a wrong one."""

    STATES = {layer: np.zeros(4, np.float32) for layer in range(2)}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("states", "made", "why"),
        [
            ({}, [[0, 0], [1, 2]], "the layers' ends are unknown in this architecture"),
            ({0: STATES[0], 2: STATES[1]}, [[0, 0], [1, 2]], "the end of layer 1 is unknown"),
            ({1: STATES[0]}, [[1, 2]], "the end of layer 0 is unknown"),
            (STATES, UnsupportedError("the head does more"), "the head does more"),
            (STATES, [[1, 2], [1, 2.02]], "the last layer's lens would be 0.02 from the decision's logits"),
            (STATES, [[1, 2], [np.nan, 2]], "the last layer's lens would be nan from the decision's logits"),
        ],
    )
    def test_there_is_a_reason_instead(self, states: Any, made: Any, why: str) -> None:
        found, said = lens(Scripted(made, [9, 1, 2]), states, [1, 2])
        assert found is None
        assert why in said

    def test_within_the_tolerance_there_is_one(self) -> None:
        made = [[np.nan, 2], [1.009, -np.inf]]
        found, why = lens(Scripted(made, [9, 1, -np.inf]), self.STATES, [1, 2])
        assert why == ""
        np.testing.assert_array_equal(found, np.array(made, np.float32))

    def test_a_decision_goes_on_without(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        records: list[Record] = []
        with Session.open(path, probe=Probe(records.append)) as session:

            def refuse(*_: object) -> None:
                raise UnsupportedError("the head does more")

            monkeypatch.setattr(session._engine, "head_logits", refuse)
            assert session.decide(**ASK).best >= 0
        assert (records[0].lens, records[0].lens_why) == (None, "the head does more")
        assert records[0].routed is not None


class TestRouting:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("arch", MOE)
    def test_counts_are_the_tokens_computed(self, arch: str, way: str, tmp_path: Path) -> None:
        """Prefilled whole, in pieces of an ubatch; the last layer may compute the last token only."""
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        (record,), (result,) = probed(path, n_ubatch=32, prefix_cache="off", **WAYS[way])
        routed = record.routed
        assert routed is not None
        assert record.n_prefilled == record.n_tokens == result.n_tokens > 64
        n_layer = tiny.FAMILIES[arch].n_layer
        assert routed.cnt.shape == routed.wsum.shape == (n_layer, 8)
        for layer in range(n_layer):
            n_tokens = 1 if layer == n_layer - 1 and arch in CUT_LAST else record.n_tokens
            is_dense = routed.n_expert[layer] == 0
            assert routed.nu[layer] == (0 if is_dense else 2)
            assert routed.cnt[layer].sum() == (0 if is_dense else 2 * n_tokens)
            wanted = 0 if is_dense else WEIGHT_SUM.get(arch, 1.0) * n_tokens
            np.testing.assert_allclose(routed.wsum[layer].sum(), wanted, rtol=1e-4)
            assert (routed.expert_mib[layer] == 0) == is_dense
        total = float((routed.n_expert * routed.expert_mib).sum())
        with Session.open(path) as session:
            assert total == pytest.approx(session.info.experts_bytes / MIB, rel=1e-3)

    def test_of_a_kept_prefix_only_what_is_computed_now_counts(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        (first, second), _ = probed(path, ASK, {**ASK, "suffix": "k?"}, prefix_cache="on")
        for record, n_pieces in ((first, 2), (second, 1)):
            assert record.n_prefilled == record.n_tokens - record.n_reused
            assert record.routed is not None
            assert record.routed.cnt.sum(axis=1).tolist() == [2 * record.n_prefilled] * 2 + [2 * n_pieces]
        assert first.n_reused == 0 < second.n_reused

    @pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba"])
    def test_a_dense_model_has_a_lens_only(self, arch: str, tmp_path: Path) -> None:
        (record,), _ = probed(tiny.write(tmp_path / "m.gguf", arch=arch))
        assert record.lens is not None
        assert record.routed is None

    def test_fewer_experts_per_token(self, tmp_path: Path) -> None:
        (record,), _ = probed(tiny.write(tmp_path / "m.gguf", arch="qwen3moe"), n_expert_used=1)
        assert record.routed is not None
        assert record.routed.nu.tolist() == [1, 1, 1]
        assert record.routed.cnt[0].sum() == record.n_prefilled


class TestSessions:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("arch", tiny.FAMILIES)
    def test_it_changes_no_bit(self, arch: str, way: str, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch=arch)
        requests = (ASK, {**ASK, "suffix": "k?"})
        answers = []
        for probe in (None, Probe(lambda record: None)):
            _, results = probed(path, *requests, n_threads=2, n_ubatch=32, probe=probe, **WAYS[way])
            answers.append([(result.choice_logp, result.outside_mass, result.n_reused) for result in results])
        assert answers[0] == answers[1]
        assert answers[0][1][2] > 0

    def test_only_decisions_that_were_made_are_told(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        records: list[Record] = []
        probe = Probe(records.append)
        with Session.open(path, n_threads=1, probe=probe) as session:
            session.decide(**ASK)
            with pytest.raises(Refused):
                session.decide(**{**ASK, "choices": ("a", "a")})
            session.generate(GenerateRequest(prompt="hello", n_predict=2))
            assert not probe._listens
            heard = dict(probe._states)
            session.perplexity("some text of several tokens")
            assert probe._states.keys() == heard.keys()
            assert all(probe._states[layer] is state for layer, state in heard.items())
            _cancelled(session, probe)
            again = session.decide(**ASK)
        assert [record.seq for record in records] == [1, 6]
        assert records[1].n_prefilled == again.n_prefilled

    def test_with_a_route_trace_both_are_told(self, tmp_path: Path) -> None:
        from bmoe.route_trace import RouteTrace

        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        with RouteTrace(tmp_path / "t.csv") as trace:
            (record,), _ = probed(path, route_trace=trace)
        rows = (tmp_path / "t.csv").read_text().splitlines()[1:]
        assert record.routed is not None
        assert len(rows) == record.routed.cnt.sum()

    def test_a_full_disk_ends_the_file_alone(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
        notes: list[str] = []
        with ProbeFile(Path("/dev/full"), note=notes.append) as file:
            _, results = probed(path, ASK, ASK, probe=Probe(file.write))
        assert [result.best >= 0 for result in results] == [True, True]
        assert notes == ["--decide-probe: /dev/full ends here: No space left on device"]

    def test_what_is_written_is_what_was_seen(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "m.gguf", arch="deepseek2")
        seen: list[Record] = []

        def both(record: Record) -> None:
            seen.append(record)
            file.write(record)

        with ProbeFile(tmp_path / "p.jsonl") as file:
            probed(path, ASK, {**ASK, "choices": CHOICES[:2]}, probe=Probe(both))
        found = list(read(tmp_path / "p.jsonl"))
        assert len(found) == len(seen) == 2
        for mine, theirs in zip(found, seen, strict=True):
            same(mine, theirs)


def same(mine: Record, theirs: Record) -> None:
    """Every field, to the bit."""
    for name in Record.__slots__:
        if name != "routed":
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), name)
    assert (mine.routed is None) == (theirs.routed is None)
    if mine.routed is not None and theirs.routed is not None:
        for name in type(mine.routed).__slots__:
            np.testing.assert_array_equal(getattr(mine.routed, name), getattr(theirs.routed, name), name)
            assert getattr(mine.routed, name).dtype == getattr(theirs.routed, name).dtype


def _cancelled(session: Session, probe: Probe) -> None:
    """A decision that is cancelled while its first layer is computed."""
    routed: Callable[[Any], None] = probe.routed
    hooks: Any = session._engine._hooks  # type: ignore[attr-defined]

    def cancel(routing: Any) -> None:
        session.cancel()
        routed(routing)

    hooks._on_routing, kept = cancel, hooks._on_routing
    try:
        assert session.decide(**{**ASK, "prefix": ASK["prefix"] * 3, "reuse_prefix": False}).cancelled
    finally:
        hooks._on_routing = kept
