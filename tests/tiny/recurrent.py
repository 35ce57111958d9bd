"""Families that remember in a state of fixed size, all of their layers or some.

Decay rates are spread so that each layer has heads that forget within a few tokens and heads that reach over hundreds.
"""

import numpy as np

from tests.tiny.family import (
    EXPERTS,
    HEAD,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD_KV,
    Draw,
    Family,
    Tensors,
    attention,
    experts,
    ffn,
    head_norms,
    ones,
)

N_CONV = 4  # taps of the convolution over time
D_INNER = 2 * N_EMBD  # llama.cpp knows no other factor for these
D_STATE, DT_RANK = 16, 4  # mamba
D_STATE2, N_SSM_HEAD, N_GROUP = 64, 4, 2  # Mamba-2: a state wide enough for every SIMD width's main loop
DELTA, N_DELTA_K, N_DELTA_V = 32, 2, 4  # gated delta net: head width, heads of keys, heads of values
N_TAP = 3  # lfm2moe's convolution, which is all that its layers without attention remember
FULL_EVERY = 2  # in a hybrid every second layer is attention


def rates(n: int) -> np.ndarray:
    return -np.geomspace(0.005, 1, n, dtype=np.float32)


def bias(draw: Draw, n: int, centre: float = 0.0) -> np.ndarray:
    return centre + 0.1 * draw(n, 1)[:, 0]


def is_full(layer: int) -> bool:
    return layer % FULL_EVERY == FULL_EVERY - 1


def mamba(_layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield "ssm_in.weight", draw(2 * D_INNER, N_EMBD)
    yield "ssm_conv1d.weight", draw(D_INNER, N_CONV)
    yield "ssm_conv1d.bias", bias(draw, D_INNER)
    yield "ssm_x.weight", draw(DT_RANK + 2 * D_STATE, D_INNER)
    yield "ssm_dt.weight", draw(D_INNER, DT_RANK)
    yield "ssm_dt.bias", bias(draw, D_INNER, -1)
    yield "ssm_a", np.tile(rates(D_STATE), (D_INNER, 1))
    yield "ssm_d", ones(D_INNER)
    yield "ssm_out.weight", draw(N_EMBD, D_INNER)


def mamba2(draw: Draw) -> Tensors:
    n_conv = D_INNER + 2 * N_GROUP * D_STATE2
    yield "ssm_in.weight", draw(D_INNER + n_conv + N_SSM_HEAD, N_EMBD)
    yield "ssm_conv1d.weight", draw(n_conv, N_CONV)
    yield "ssm_conv1d.bias", bias(draw, n_conv)
    yield "ssm_dt.bias", bias(draw, N_SSM_HEAD, -1)
    yield "ssm_a", rates(N_SSM_HEAD)[:, None]
    yield "ssm_d", ones(N_SSM_HEAD, 1)
    yield "ssm_norm.weight", ones(N_GROUP, D_INNER // N_GROUP)
    yield "ssm_out.weight", draw(N_EMBD, D_INNER)


def granitehybrid(layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    yield from attention(draw) if is_full(layer) else mamba2(draw)
    yield "ffn_norm.weight", ones(N_EMBD)
    yield from experts(draw)
    yield from ffn(draw, "_shexp")


def delta_net(draw: Draw, *, joined: bool) -> Tensors:
    """One recurrent layer; joined: the rows of beta and alpha in one tensor."""
    key, value = DELTA * N_DELTA_K, DELTA * N_DELTA_V
    yield "attn_qkv.weight", draw(2 * key + value, N_EMBD)
    yield "attn_gate.weight", draw(value, N_EMBD)
    yield "ssm_conv1d.weight", draw(2 * key + value, N_CONV)
    yield "ssm_dt.bias", bias(draw, N_DELTA_V)
    yield "ssm_a", rates(N_DELTA_V)
    if joined:
        yield "ssm_ba.weight", draw(2 * N_DELTA_V, N_EMBD)
    else:
        yield "ssm_beta.weight", draw(N_DELTA_V, N_EMBD)
        yield "ssm_alpha.weight", draw(N_DELTA_V, N_EMBD)
    yield "ssm_norm.weight", ones(DELTA)
    yield "ssm_out.weight", draw(N_EMBD, value)


def gated_delta(layer: int, draw: Draw, *, joined: bool) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    if is_full(layer):
        yield from attention(draw, n_query=2)
        yield from head_norms()
    else:
        yield from delta_net(draw, joined=joined)
    yield "post_attention_norm.weight", ones(N_EMBD)
    yield from experts(draw)
    yield from ffn(draw, "_shexp")
    yield "ffn_gate_inp_shexp.weight", draw(1, N_EMBD)[0]


def qwen3next(layer: int, draw: Draw) -> Tensors:
    return gated_delta(layer, draw, joined=True)


def qwen35moe(layer: int, draw: Draw) -> Tensors:
    return gated_delta(layer, draw, joined=False)


def lfm2moe(layer: int, draw: Draw) -> Tensors:
    yield "attn_norm.weight", ones(N_EMBD)
    if is_full(layer):
        yield from attention(draw)
        yield from head_norms()
    else:
        yield "shortconv.in_proj.weight", draw(3 * N_EMBD, N_EMBD)
        yield "shortconv.conv.weight", draw(N_EMBD, N_TAP)
        yield "shortconv.out_proj.weight", draw(N_EMBD, N_EMBD)
    yield "ffn_norm.weight", ones(N_EMBD)
    if layer == 0:
        yield from ffn(draw)
        return
    yield from experts(draw)
    yield "exp_probs_b.bias", bias(draw, N_EXPERT)


GATED_DELTA = {
    **EXPERTS,
    "expert_shared_feed_forward_length": N_FF,
    "full_attention_interval": FULL_EVERY,
    "rope.dimension_count": HEAD // 2,
    "ssm.conv_kernel": N_CONV,
    "ssm.inner_size": DELTA * N_DELTA_V,
    "ssm.state_size": DELTA,
    "ssm.time_step_rank": N_DELTA_V,
    "ssm.group_count": N_DELTA_K,
}

RECURRENT_FAMILIES = {
    "qwen3next": Family(arch="qwen3next", layer=qwen3next, n_layer=4, metadata=GATED_DELTA),
    "qwen35moe": Family(
        arch="qwen35moe",
        layer=qwen35moe,
        n_layer=4,
        metadata={**GATED_DELTA, "rope.dimension_sections": [2, 1, 1, 0]},  # a position of four parts a token
    ),
    "lfm2moe": Family(
        arch="lfm2moe",
        layer=lfm2moe,
        n_layer=4,
        output_norm="token_embd_norm",
        metadata={
            **EXPERTS,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,  # sigmoid
            "attention.head_count_kv": [N_HEAD_KV if is_full(layer) else 0 for layer in range(4)],
            "shortconv.l_cache": N_TAP,
        },
    ),
    "granitehybrid": Family(
        arch="granitehybrid",
        layer=granitehybrid,
        n_layer=4,
        metadata={
            **EXPERTS,
            "expert_shared_feed_forward_length": N_FF,
            "attention.head_count_kv": [N_HEAD_KV if is_full(layer) else 0 for layer in range(4)],
            "attention.scale": 1 / HEAD,
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
            "rope.scaling.finetuned": False,  # no positions
            "ssm.conv_kernel": N_CONV,
            "ssm.inner_size": D_INNER,
            "ssm.state_size": D_STATE2,
            "ssm.time_step_rank": N_SSM_HEAD,
            "ssm.group_count": N_GROUP,
        },
    ),
    "mamba": Family(
        arch="mamba",
        layer=mamba,
        metadata={
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.freq_base": None,
            "ssm.conv_kernel": N_CONV,
            "ssm.inner_size": D_INNER,
            "ssm.state_size": D_STATE,
            "ssm.time_step_rank": DT_RANK,
        },
    ),
}
