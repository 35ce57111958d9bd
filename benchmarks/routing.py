"""Which experts a `qwen3moe` file routes prompts to, computed from the file alone.

Run it with `python benchmarks/routing.py MODEL PROMPTS` on what make_moe.py wrote. It prints the share of a layer's
experts that a prompt touches, and how much of a prompt's expert bytes another prompt has read before, of the same topic
and of others. The model is computed in numpy, each expert unpacked once for all prompts: a minute for each layer of 128
experts. All layers are made alike, so a model of a few tells enough.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bmoe_native import Engine

UNPACKED_ROWS = 4096  # at a time


class Weights:
    """The tensors of one file, unpacked when they are asked for."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def key(self, name: str) -> Any:
        return self._fields[f"qwen3moe.{name}"].contents()

    def __call__(self, name: str, rows: Any = None) -> Any:
        """A tensor's rows, or its part with this index: float32."""
        tensor = self._tensors[f"{name}.weight"]
        packed = tensor.data if rows is None else tensor.data[rows]
        if packed.ndim < 2 or tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            return np.float32(packed)
        parts = (packed[at : at + UNPACKED_ROWS] for at in range(0, len(packed), UNPACKED_ROWS))
        return np.concatenate([gguf.quants.dequantize(part, tensor.tensor_type) for part in parts])

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer."""
        names = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        return sum(int(self._tensors[name].n_bytes) // self.key("expert_count") for name in names)


def normed(x: Any, weight: Any, epsilon: float) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def rotated(x: Any, base: float) -> Any:
    """Rotary positions, halves paired: [token, head, width] → the same."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = x[..., :half], x[..., half:]
    return np.float32(np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Attention:
    def __init__(self, weights: Weights, layer: int) -> None:
        at = f"blk.{layer}.attn_"
        self.q, self.k, self.v, self.out = (weights(at + part) for part in ("q", "k", "v", "output"))
        self.q_norm, self.k_norm = weights(at + "q_norm"), weights(at + "k_norm")
        self.n_head, self.n_head_kv = weights.key("attention.head_count"), weights.key("attention.head_count_kv")
        self.base = weights.key("rope.freq_base")
        self.epsilon = weights.key("attention.layer_norm_rms_epsilon")

    def __call__(self, x: Any) -> Any:
        """[token, width] → the same, of one prompt."""
        n = len(x)
        q = rotated(normed((x @ self.q.T).reshape(n, self.n_head, -1), self.q_norm, self.epsilon), self.base)
        k = rotated(normed((x @ self.k.T).reshape(n, self.n_head_kv, -1), self.k_norm, self.epsilon), self.base)
        v = (x @ self.v.T).reshape(n, self.n_head_kv, -1)
        k, v = (np.repeat(a, self.n_head // self.n_head_kv, axis=1) for a in (k, v))
        scores = np.einsum("thd,shd->hts", q, k, optimize=True) / np.sqrt(np.float32(q.shape[-1]))
        scores += np.triu(np.full((n, n), -np.inf, np.float32), 1)
        return np.einsum("hts,shd->thd", softmax(scores), v, optimize=True).reshape(n, -1) @ self.out.T


def experts(weights: Weights, layer: int, x: Any, ids: Any, shares: Any) -> Any:
    """What the experts `ids` make of each token, each by its share: [token, width] → the same."""
    at = f"blk.{layer}.ffn_"
    total = np.zeros_like(x)
    for expert in np.unique(ids):
        tokens, slots = np.nonzero(ids == expert)
        mine = x[tokens]
        gate, up = mine @ weights(at + "gate_exps", expert).T, mine @ weights(at + "up_exps", expert).T
        made = (gate / (1 + np.exp(-gate)) * up) @ weights(at + "down_exps", expert).T
        total[tokens] += shares[tokens, slots, None] * made
    return total


def forward(weights: Weights, prompts: Sequence[Sequence[int]]) -> tuple[list[Any], Any]:
    """The experts each token of each prompt is routed to, and the logits after each prompt.

    Shapes: per prompt int64 [layer, token, used]; float32 [prompt, vocabulary].
    """
    epsilon, n_used = weights.key("attention.layer_norm_rms_epsilon"), weights.key("expert_used_count")
    ends = np.cumsum([len(prompt) for prompt in prompts])
    x = weights("token_embd", np.concatenate(prompts))
    routes = []
    for layer in range(weights.key("block_count")):
        attention = Attention(weights, layer)
        parts = np.split(normed(x, weights(f"blk.{layer}.attn_norm"), epsilon), ends[:-1])
        x = x + np.concatenate([attention(part) for part in parts])
        seen = normed(x, weights(f"blk.{layer}.ffn_norm"), epsilon)
        liked = seen @ weights(f"blk.{layer}.ffn_gate_inp").T
        ids = np.argsort(-liked, axis=1)[:, :n_used]
        shares = softmax(np.take_along_axis(liked, ids, axis=1))
        x = x + experts(weights, layer, seen, ids, shares)
        routes.append(np.split(ids, ends[:-1]))
        print(f"\rlayer {layer + 1}", end="", file=sys.stderr)
    print(file=sys.stderr)
    logits = normed(x[ends - 1], weights("output_norm"), epsilon) @ weights("output").T
    return [np.stack(prompt) for prompt in zip(*routes, strict=True)], logits


def touched(routes: Any, n_expert: int) -> Any:
    """Which experts any token of a prompt is routed to: bool [layer, expert]."""
    found = np.zeros((len(routes), n_expert), bool)
    for layer, ids in enumerate(routes):
        found[layer, ids] = True
    return found


def reused(first: Any, second: Any, expert_bytes: Any) -> float:
    """The share of the second prompt's expert bytes that the first had read."""
    return float((first & second).sum(axis=1) @ expert_bytes / (second.sum(axis=1) @ expert_bytes))


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    weights = Weights(model)
    files = sorted(folder.glob("p*-*-[01].txt"))  # two of each topic and length
    with Engine.open(model, inspect=True) as engine:
        prompts = [engine.tokenize(file.read_text()) for file in files]
    routes, _ = forward(weights, prompts)
    n_expert = weights.key("expert_count")
    sizes = np.asarray([weights.expert_bytes(layer) for layer in range(weights.key("block_count"))])
    # Of the last layer llama.cpp computes the last token only: it is no part of this.
    sets = [touched(route, n_expert)[:-1] for route in routes]
    sizes = sizes[:-1]
    names = [file.stem.split("-") for file in files]
    for length in sorted({len(prompt) for prompt in prompts}):
        of = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        shares = np.stack([sets[i].mean(axis=1) for i in of])
        same: list[float] = []
        other: list[float] = []
        for i, j in itertools.permutations(of, 2):
            (same if names[i][1] == names[j][1] else other).append(reused(sets[i], sets[j], sizes))
        read = np.mean([sets[i].sum(axis=1) @ sizes for i in of])
        print(
            f"{length} tokens: {100 * shares.mean():.1f} % of a layer's experts, by prompt "
            f"{100 * shares.mean(axis=1).min():.1f} to {100 * shares.mean(axis=1).max():.1f}, by layer "
            f"{100 * shares.mean(axis=0).min():.1f} to {100 * shares.mean(axis=0).max():.1f}; {read / 1e9:.2f} GB"
        )
        for what, values in (("the same topic", same), ("another topic", other)):
            if values:
                print(
                    f"  read before by a prompt of {what}: {100 * np.mean(values):.1f} % "
                    f"({100 * min(values):.1f} to {100 * max(values):.1f})"
                )


if __name__ == "__main__":
    main()
