"""Tiny models with seeded random weights: a few hundred KB, every family built as the real one is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "i n", "a n", "th e", "Ġ th", "Ġ a", "o n")
N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_LAYER, N_EXPERT, N_EXPERT_USED = 64, 4, 2, 96, 3, 8, 2
HEAD = N_EMBD // N_HEAD


def byte_letters() -> list[str]:
    """The printable stand-ins GPT-2's byte-level BPE has for the 256 bytes.

    Source: the byte encoder of the GPT-2 tokenizer: printable Latin-1 stands for itself, the rest follow from U+0100.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, fresh = {}, 256
    for byte in range(256):
        letters[byte] = chr(byte) if byte in own else chr(fresh)
        fresh += byte not in own
    return [letters[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int]]:
    """Tokens and their types: every byte, a few merges, one user-defined word, the control tokens."""
    tokens = byte_letters() + [merge.replace(" ", "") for merge in MERGES]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    tokens += ["<tool>", *CONTROL]
    types += [gguf.TokenType.USER_DEFINED, *[gguf.TokenType.CONTROL] * len(CONTROL)]
    return tokens, [int(kind) for kind in types]


def layer_tensors(arch: str, weights: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Name and array of one layer's tensors, without the blk.N. in front; numpy shapes are [out, in]."""
    kv = HEAD * N_HEAD_KV
    yield "attn_norm.weight", np.ones(N_EMBD, np.float32)
    yield "attn_q.weight", weights(N_EMBD, N_EMBD)
    yield "attn_k.weight", weights(kv, N_EMBD)
    yield "attn_v.weight", weights(kv, N_EMBD)
    yield "attn_output.weight", weights(N_EMBD, N_EMBD)
    yield "ffn_norm.weight", np.ones(N_EMBD, np.float32)
    if arch == "qwen3moe":
        yield "attn_q_norm.weight", np.ones(HEAD, np.float32)
        yield "attn_k_norm.weight", np.ones(HEAD, np.float32)
        yield "ffn_gate_inp.weight", weights(N_EXPERT, N_EMBD)
        yield "ffn_gate_exps.weight", weights(N_EXPERT, N_FF, N_EMBD)
        yield "ffn_up_exps.weight", weights(N_EXPERT, N_FF, N_EMBD)
        yield "ffn_down_exps.weight", weights(N_EXPERT, N_EMBD, N_FF)
    else:
        yield "ffn_gate.weight", weights(N_FF, N_EMBD)
        yield "ffn_up.weight", weights(N_FF, N_EMBD)
        yield "ffn_down.weight", weights(N_EMBD, N_FF)


def add_vocabulary(writer: gguf.GGUFWriter, *, template: str | None, bos: bool, pre: str = "qwen2") -> None:
    tokens, types = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(bos)
    if template is not None:
        writer.add_chat_template(template)


def write(
    path: Path,
    *,
    arch: str = "llama",
    seed: int = 1,
    n_ctx_train: int = 512,
    template: str | None = CHATML,
    bos: bool = False,
    pre: str = "qwen2",
    tensors_per_shard: int = 0,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    head: Callable[[Any], Any] = lambda rows: rows,
) -> Path:
    """Write a model and return its path, the first shard's where it is split.

    `edit` may add metadata; `head` may change the output rows, float32 [n_vocab, n_embd].
    """
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> Any:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_shard)
    writer.add_type("model")
    writer.add_name(f"tiny {arch}")
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if arch == "qwen3moe":
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(N_EXPERT_USED)
        writer.add_expert_feed_forward_length(N_FF)
    add_vocabulary(writer, template=template, bos=bos, pre=pre)
    edit(writer)
    n_vocab = len(vocabulary()[0])
    writer.add_tensor("token_embd.weight", weights(n_vocab, N_EMBD))
    for layer in range(N_LAYER):
        for name, array in layer_tensors(arch, weights):
            writer.add_tensor(f"blk.{layer}.{name}", array)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    writer.add_tensor("output.weight", head(4 * weights(n_vocab, N_EMBD)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{shards(path):05d}.gguf") if tensors_per_shard else path


def shards(path: Path) -> int:
    """How many shards of a split model lie beside its name."""
    return len(list(path.parent.glob(f"{path.stem}-*-of-*.gguf")))
