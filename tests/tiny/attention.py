"""Families that remember by attention: plain, sliding window, sinks, latent (MLA)."""

import gguf
import numpy as np

from tests.tiny.family import (
    EXPERTS,
    HEAD,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    WINDOW,
    Draw,
    Family,
    Tensors,
    attention,
    experts,
    ffn,
    head_norms,
    ones,
)

# Of three layers the last is full, as the last of every group is in the real ones.
IS_SWA = [True, True, False]
FULL_HEAD = 2 * HEAD  # gemma4's full layers have wider heads, and one of keys and values
N_ROT, N_NOPE, N_LORA = 8, 16, 32  # deepseek2: rotated and plain part of a head; rank of queries, and of keys


def llama(_layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw)
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from ffn(draw)


def qwen3moe(_layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw)
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from head_norms()
    yield from experts(draw)


def gemma3(_layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw)
    yield from head_norms()
    yield "post_attention_norm.weight", ones(N_EMBD)
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from ffn(draw)
    yield "post_ffw_norm.weight", ones(N_EMBD)


def gemma4(layer: int, draw: Draw) -> Tensors:
    head, n_head_kv = (HEAD, N_HEAD_KV) if IS_SWA[layer] else (FULL_HEAD, 1)
    yield "attn_norm.weight", ones(N_EMBD)
    for name, array in attention(draw, n_head_kv=n_head_kv, head=head):
        if IS_SWA[layer] or name != "attn_v.weight":  # full layers take the keys for values
            yield name, array
    yield from head_norms(head)
    yield "post_attention_norm.weight", ones(N_EMBD)
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from ffn(draw)  # beside the experts, as a shared one
    yield "post_ffw_norm_1.weight", ones(N_EMBD)
    yield "pre_ffw_norm_2.weight", ones(N_EMBD)
    yield from experts(draw, fused=True)
    yield "ffn_gate_inp.scale", np.sqrt(N_EMBD) * ones(N_EMBD)  # the router's input is divided by that
    yield "ffn_down_exps.scale", 1 + 0.1 * draw(N_EXPERT, 1)[:, 0]
    yield "post_ffw_norm_2.weight", ones(N_EMBD)
    yield "post_ffw_norm.weight", ones(N_EMBD)


def gemma4_shared() -> Tensors:
    rotated = FULL_HEAD // 4
    yield "rope_freqs.weight", np.repeat(np.float32([1, 1e30]), [rotated, FULL_HEAD // 2 - rotated])


def gpt_oss(_layer: int, draw: Draw) -> Tensors:
    def bias(*shape: int) -> np.ndarray:
        return 0.1 * draw(*shape, 1)[..., 0]

    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw)
    yield "attn_q.bias", bias(N_HEAD * HEAD)
    yield "attn_k.bias", bias(N_HEAD_KV * HEAD)
    yield "attn_v.bias", bias(N_HEAD_KV * HEAD)
    yield "attn_output.bias", bias(N_EMBD)
    yield "attn_sinks.weight", draw(N_HEAD, 1)[:, 0]
    yield "post_attention_norm.weight", ones(N_EMBD)
    yield from experts(draw)
    yield "ffn_gate_inp.bias", bias(N_EXPERT)
    yield "ffn_gate_exps.bias", bias(N_EXPERT, N_FF)
    yield "ffn_up_exps.bias", bias(N_EXPERT, N_FF)
    yield "ffn_down_exps.bias", bias(N_EXPERT, N_EMBD)


def deepseek2(layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield "attn_q_a.weight", draw(N_LORA, N_EMBD)
    yield "attn_q_a_norm.weight", ones(N_LORA)
    yield "attn_q_b.weight", draw(N_HEAD * (N_NOPE + N_ROT), N_LORA)
    yield "attn_kv_a_mqa.weight", draw(N_LORA + N_ROT, N_EMBD)
    yield "attn_kv_a_norm.weight", ones(N_LORA)
    yield "attn_k_b.weight", draw(N_HEAD, N_LORA, N_NOPE)
    yield "attn_v_b.weight", draw(N_HEAD, HEAD, N_LORA)
    yield "attn_output.weight", draw(N_EMBD, N_HEAD * HEAD)
    yield "ffn_norm.weight", ones(N_EMBD)
    if layer == 0:
        yield from ffn(draw)
        return
    yield from experts(draw)
    yield "exp_probs_b.bias", 0.05 * draw(N_EXPERT, 1)[:, 0]
    yield from ffn(draw, "_shexp")


ATTENTION_FAMILIES = {
    "llama": Family(arch="llama", layer=llama),
    "qwen3moe": Family(arch="qwen3moe", layer=qwen3moe, metadata=EXPERTS),
    "qwen3moe-split": Family(arch="qwen3moe", layer=qwen3moe, metadata=EXPERTS, tensors_per_shard=12),
    "gemma3": Family(
        arch="gemma3",
        layer=gemma3,
        metadata={
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": IS_SWA,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gemma4": Family(
        arch="gemma4",
        layer=gemma4,
        shared=gemma4_shared,
        metadata={
            **EXPERTS,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": IS_SWA,
            "attention.head_count_kv": [N_HEAD_KV if swa else 1 for swa in IS_SWA],
            "attention.key_length": FULL_HEAD,
            "attention.value_length": FULL_HEAD,
            "attention.key_length_swa": HEAD,
            "attention.value_length_swa": HEAD,
            "attention.shared_kv_layers": 0,
            "rope.dimension_count": FULL_HEAD,
            "rope.dimension_count_swa": HEAD,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gpt-oss": Family(
        arch="gpt-oss",
        layer=gpt_oss,
        expert_type=gguf.GGMLQuantizationType.MXFP4,
        metadata={**EXPERTS, "attention.sliding_window": WINDOW},  # every other layer, from the first on
    ),
    "deepseek2": Family(
        arch="deepseek2",
        layer=deepseek2,
        metadata={
            **EXPERTS,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,  # sigmoid
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": N_LORA,
            "attention.kv_lora_rank": N_LORA,
            "attention.key_length": N_LORA + N_ROT,
            "attention.value_length": N_LORA,
            "attention.key_length_mla": N_NOPE + N_ROT,
            "attention.value_length_mla": HEAD,
            "rope.dimension_count": N_ROT,
        },
    ),
}
