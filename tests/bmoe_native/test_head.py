"""The head: what it makes of the last layer's state are the logits; rows and norm against the file and numpy."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, Head, ReadError, StateError
from bmoe_native.types import Float32Array
from tests import tiny

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 30)]
ASKED = [3, 50, 100, 200]


def states_and_logits(engine: Engine, states: dict[int, Float32Array]) -> tuple[Float32Array, Float32Array]:
    engine.prefill(TOKENS)
    return np.stack([states[layer] for layer in range(engine.info.n_layer)]), engine.logits()


def in_numpy(head: Head, state: Float32Array, rows: Float32Array, biases: Float32Array) -> np.ndarray:
    """The formula of bmoe.h in float64."""
    x = state.astype(np.float64)
    x = x - x.mean() if head.norm == "layer" else x
    normed = x / np.sqrt((x * x).mean() + head.epsilon) * head.norm_weight + head.norm_bias
    logits = head.logit_scale * (rows.astype(np.float64) @ normed + biases)
    return head.softcap * np.tanh(logits / head.softcap) if head.softcap else logits


@pytest.mark.parametrize("arch", tiny.FAMILIES)
def test_the_last_layers_head_is_the_decision(arch: str, tmp_path: Path) -> None:
    states: dict[int, Float32Array] = {}
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    with Engine.open(path, on_layer=states.__setitem__) as engine:
        stacked, logits = states_and_logits(engine, states)
        made = engine.head_logits(stacked, ASKED)
        np.testing.assert_allclose(made[-1], logits[ASKED], rtol=0, atol=1e-5)
        assert np.abs(made[0] - logits[ASKED]).max() > 0.01  # an earlier layer says something else
        head, (rows, biases) = engine.head(), engine.head_rows(ASKED)
        for state, lens in zip(stacked, made, strict=True):
            np.testing.assert_allclose(in_numpy(head, state, rows, biases), lens, rtol=0, atol=1e-4)
    assert (head.softcap, head.logit_scale) == {"gemma4": (30.0, 1.0), "granitehybrid": (0.0, 0.5)}.get(arch, (0, 1))


def test_quantized_heads_too(named_models: list[Path]) -> None:
    """Of Q4_1, Q6_K and Q8_0, two of them tied to the embeddings, by the kernels that graphs use."""
    for path in named_models:
        states: dict[int, Float32Array] = {}
        with Engine.open(path, on_layer=states.__setitem__) as engine:
            stacked, logits = states_and_logits(engine, states)
            last = engine.head_logits(stacked[-1:], ASKED)[0]
            np.testing.assert_allclose(last, logits[ASKED], rtol=0, atol=1e-3)
            rows, _ = engine.head_rows(ASKED)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        weight = tensors.get("output.weight", tensors["token_embd.weight"])
        wanted = gguf.quants.dequantize(weight.data[ASKED], weight.tensor_type)
        np.testing.assert_allclose(rows, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_rows_are_of_the_file_that_was_opened_or_none(how: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="llama")
    with Engine.open(path, on_layer=lambda layer, state: None) as engine:
        engine.prefill(TOKENS)
        rows, _ = engine.head_rows(ASKED)
        if how == "replaced":
            os.replace(tiny.write(tmp_path / "other.gguf", arch="llama", seed=9), path)
        else:
            os.utime(path, ns=(1, 1))
        for read in (engine.head, lambda: engine.head_rows(ASKED)):
            with pytest.raises(ReadError, match=rf"changed while it was open: .*m\.gguf was {how}"):
                read()
    assert rows.any()


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch="llama")
    with Engine.open(path, on_layer=lambda layer, state: None) as engine:
        with pytest.raises(StateError, match="once logits were computed"):
            engine.head()
        engine.prefill(TOKENS)
        for tokens in ([-1], [engine.info.n_vocab]):
            with pytest.raises(ArgumentError, match="token is"):
                engine.head_rows(tokens)
        with pytest.raises(ArgumentError, match=r"shape \(2, 3\)"):
            engine.head_logits(np.zeros((2, 3), np.float32), ASKED)
        assert engine.head_rows([])[0].shape == (0, engine.info.n_embd)
    with Engine.open(path) as engine:
        engine.prefill(TOKENS)
        with pytest.raises(StateError, match="with a layer hook"):
            engine.head()
