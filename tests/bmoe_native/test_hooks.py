"""What hooks are told of a graph: the routers' choices and what layers hand on; and that they change nothing."""

from pathlib import Path

import numpy as np
import pytest

from bmoe_native import Engine, Routing, Streaming
from bmoe_native.types import RESIDENCY, Float32Array
from tests import tiny

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 40)]
MOE = [arch for arch in tiny.FAMILIES if arch not in ("llama", "gemma3", "mamba")]
NORMALISED = {"deepseek2": 1.5}  # what the weights of a token sum to, where that is not 1
CUT_LAST = {"qwen3moe", "qwen3moe-split", "deepseek2", "lfm2moe", "granitehybrid"}  # in the last layer


class Heard:
    def __init__(self) -> None:
        self.routings: list[Routing] = []
        self.layers: list[tuple[int, Float32Array]] = []

    def open(self, path: Path, **options: object) -> Engine:
        return Engine.open(
            path,
            n_threads=2,
            repack=False,
            on_routing=self.routings.append,
            on_layer=lambda layer, state: self.layers.append((layer, state)),
            **options,  # type: ignore[arg-type]
        )


def answer(engine: Engine) -> Float32Array:
    engine.prefill(TOKENS)
    return engine.logits()


@pytest.mark.parametrize("arch", tiny.FAMILIES)
def test_hooks_change_no_bit_and_hear_every_layer(arch: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    with Engine.open(path, n_threads=2, repack=False) as engine:
        wanted = answer(engine)
    heard = Heard()
    with heard.open(path) as engine:
        np.testing.assert_array_equal(answer(engine), wanted)
        info = engine.info
    assert [layer for layer, _ in heard.layers] == list(range(info.n_layer))
    assert all(state.shape == (info.n_embd,) and np.isfinite(state).all() for _, state in heard.layers)
    assert len(heard.routings) == info.n_moe_layer


@pytest.mark.parametrize("arch", MOE)
def test_each_token_has_its_experts_and_their_weights(arch: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    heard = Heard()
    with heard.open(path) as engine:
        answer(engine)
        info = engine.info
    for routing in heard.routings:
        is_last = routing.layer == info.n_layer - 1
        n_tokens = 1 if is_last and arch in CUT_LAST else len(TOKENS)
        assert routing.experts.shape == routing.weights.shape == (n_tokens, info.n_expert_used)
        assert routing.residency is None
        assert 0 <= routing.experts.min() <= routing.experts.max() < routing.n_expert == info.n_expert
        assert all(len(set(row)) == info.n_expert_used for row in routing.experts.tolist())
        np.testing.assert_allclose(routing.weights.sum(axis=1), NORMALISED.get(arch, 1.0), rtol=1e-5)


@pytest.mark.parametrize("arch", MOE)
def test_streamed_routing_is_the_same_and_says_where_experts_were(arch: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    resident, streamed = Heard(), Heard()
    with resident.open(path) as engine:
        answer(engine)
    with streamed.open(path, streaming=Streaming(cache_bytes=1 << 30, prefetch="off")) as engine:
        for _ in range(2):
            engine.drop_state()
            answer(engine)
    n = len(resident.routings)
    assert len(streamed.routings) == 2 * n
    for wanted, first, second in zip(resident.routings, streamed.routings[:n], streamed.routings[n:], strict=True):
        for got, where in ((first, "absent"), (second, "resident")):
            np.testing.assert_array_equal(got.experts, wanted.experts)
            np.testing.assert_array_equal(got.weights, wanted.weights)
            assert got.residency is not None
            assert {RESIDENCY[code] for code in got.residency.ravel()} == {where}


def test_weights_are_what_a_router_gives(tmp_path: Path) -> None:
    """Of the first layer's router and the first token, whose attention is to itself alone: in numpy, from the file."""
    import gguf

    path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def weight(name: str) -> Float32Array:
        tensor = tensors[name + ".weight"]
        return np.float32(gguf.quants.dequantize(tensor.data, tensor.tensor_type))

    def normed(x: Float32Array, by: str) -> Float32Array:
        return np.float32(x / np.sqrt((x * x).mean() + 1e-6) * weight(by))

    heard = Heard()
    with heard.open(path) as engine:
        engine.prefill(TOKENS[:1])
    x = weight("token_embd")[TOKENS[0]]
    value = weight("blk.0.attn_v") @ normed(x, "blk.0.attn_norm")
    n_heads = weight("blk.0.attn_output").shape[1] // value.size * value.size
    heads = value.reshape(-1, weight("blk.0.attn_q_norm").size)
    value = np.repeat(heads, n_heads // value.size, axis=0).ravel()
    x = x + weight("blk.0.attn_output") @ value
    logits = weight("blk.0.ffn_gate_inp") @ normed(x, "blk.0.ffn_norm")
    first = heard.routings[0]
    chosen = np.argsort(-logits)[: first.experts.shape[1]]
    np.testing.assert_array_equal(first.experts[0], chosen)
    odds = np.exp(logits[chosen] - logits.max())
    np.testing.assert_allclose(first.weights[0], odds / odds.sum(), rtol=2e-2)


def test_only_the_last_piece_of_a_prefill_tells_of_layers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")
    heard = Heard()
    with heard.open(path, n_ubatch=16) as engine:
        answer(engine)
        assert [layer for layer, _ in heard.layers] == [0, 1, 2]
        assert [routing.experts.shape[0] for routing in heard.routings if routing.layer == 1] == [16, 16, 8]


def test_what_a_hook_raises_ends_the_prefill_and_is_raised(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="qwen3moe")

    def refuse(_routing: Routing) -> None:
        raise LookupError("no more")

    with Engine.open(path, on_routing=refuse) as engine:
        with pytest.raises(LookupError, match="no more"):
            engine.prefill(TOKENS)
        assert engine.position in (0, len(TOKENS))
