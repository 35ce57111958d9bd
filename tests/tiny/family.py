"""What a family of models is, the sizes all share, and the layer parts that several are built from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_LAYER, N_EXPERT, N_EXPERT_USED = 64, 4, 2, 96, 3, 8, 2
HEAD = N_EMBD // N_HEAD
WINDOW = 32  # tokens a sliding window sees

Draw = Callable[..., Any]  # shape → float32 weights that keep the size of what they multiply; shapes are [out, in]
Tensors = Iterator[tuple[str, Any]]  # name and float32 array; a layer's names lack the blk.N. in front

BASE: Mapping[str, Any] = {
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_HEAD_KV,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
EXPERTS: Mapping[str, Any] = {
    "expert_count": N_EXPERT,
    "expert_used_count": N_EXPERT_USED,
    "expert_feed_forward_length": N_FF,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    arch: str
    layer: Callable[[int, Draw], Tensors]
    n_layer: int = N_LAYER
    metadata: Mapping[str, Any] = field(default_factory=dict)  # over BASE, without the arch; None leaves a key out
    shared: Callable[[], Tensors] = lambda: iter(())  # tensors of no layer, besides embedding and output
    output_norm: str = "output_norm"
    expert_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    tensors_per_shard: int = 0


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def attention(draw: Draw, *, n_head_kv: int = N_HEAD_KV, head: int = HEAD, n_query: int = 1) -> Tensors:
    """Projections of one attention layer; n_query is 2 where the query comes with a gate."""
    yield "attn_q.weight", draw(n_query * N_HEAD * head, N_EMBD)
    yield "attn_k.weight", draw(n_head_kv * head, N_EMBD)
    yield "attn_v.weight", draw(n_head_kv * head, N_EMBD)
    yield "attn_output.weight", draw(N_EMBD, N_HEAD * head)


def head_norms(head: int = HEAD) -> Tensors:
    yield "attn_q_norm.weight", ones(head)
    yield "attn_k_norm.weight", ones(head)


def ffn(draw: Draw, which: str = "") -> Tensors:
    """A dense feed-forward part, or with _shexp the shared expert."""
    yield f"ffn_gate{which}.weight", draw(N_FF, N_EMBD)
    yield f"ffn_up{which}.weight", draw(N_FF, N_EMBD)
    yield f"ffn_down{which}.weight", draw(N_EMBD, N_FF)


def experts(draw: Draw, *, fused: bool = False) -> Tensors:
    """Router and routed experts; fused: gate and up rows in one tensor."""
    yield "ffn_gate_inp.weight", draw(N_EXPERT, N_EMBD)
    if fused:
        yield "ffn_gate_up_exps.weight", draw(N_EXPERT, 2 * N_FF, N_EMBD)
    else:
        yield "ffn_gate_exps.weight", draw(N_EXPERT, N_FF, N_EMBD)
        yield "ffn_up_exps.weight", draw(N_EXPERT, N_FF, N_EMBD)
    yield "ffn_down_exps.weight", draw(N_EXPERT, N_EMBD, N_FF)
