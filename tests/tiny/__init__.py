"""Tiny models with seeded random weights: a few MB at most, every family built as the real one is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny.attention import ATTENTION_FAMILIES
from tests.tiny.family import BASE, N_EMBD, WINDOW, Family
from tests.tiny.recurrent import RECURRENT_FAMILIES
from tests.tiny.vocabulary import CHATML, add_vocabulary, vocabulary

__all__ = ["CHATML", "FAMILIES", "WINDOW", "Family", "add_vocabulary", "shards", "vocabulary", "write"]

FAMILIES: dict[str, Family] = {**ATTENTION_FAMILIES, **RECURRENT_FAMILIES}


def add_metadata(writer: gguf.GGUFWriter, family: Family, name: str, n_ctx_train: int) -> None:
    writer.add_type("model")
    writer.add_name(f"tiny {name}")
    writer.add_context_length(n_ctx_train)
    writer.add_block_count(family.n_layer)
    for key, value in {**BASE, **family.metadata}.items():
        full = f"{family.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_array(full, value)
    all_f32 = family.expert_type == gguf.GGMLQuantizationType.F32
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if all_f32 else gguf.LlamaFileType.MOSTLY_MXFP4_MOE)


def add_tensor(writer: gguf.GGUFWriter, family: Family, name: str, array: Any) -> None:
    if name.endswith("_exps.weight") and family.expert_type != gguf.GGMLQuantizationType.F32:
        packed = gguf.quants.quantize(array, family.expert_type)
        writer.add_tensor(name, packed, raw_dtype=family.expert_type)
    else:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))


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
    change: Callable[[str, Any], Any] = lambda name, array: array,
) -> Path:
    """Write a model of FAMILIES[arch] and return its path, the first shard's where it is split.

    `edit` may add metadata; `head` may change the output rows, float32 [n_vocab, n_embd]; `change` any tensor of a
    layer, float32 and before it is quantized, by its name.
    """
    family = FAMILIES[arch]
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors_per_shard = tensors_per_shard or family.tensors_per_shard
    writer = gguf.GGUFWriter(path, family.arch, split_max_tensors=tensors_per_shard)
    add_metadata(writer, family, arch, n_ctx_train)
    add_vocabulary(writer, template=template, bos=bos, pre=pre)
    edit(writer)
    n_vocab = len(vocabulary()[0])
    writer.add_tensor("token_embd.weight", draw(n_vocab, N_EMBD))
    for name, array in family.shared():
        add_tensor(writer, family, name, array)
    for layer in range(family.n_layer):
        for part, array in family.layer(layer, draw):
            name = f"blk.{layer}.{part}"
            add_tensor(writer, family, name, change(name, array))
    writer.add_tensor(f"{family.output_norm}.weight", np.ones(N_EMBD, np.float32))
    writer.add_tensor("output.weight", head(4 * draw(n_vocab, N_EMBD)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{shards(path):05d}.gguf") if tensors_per_shard else path


def shards(path: Path) -> int:
    """How many shards of a split model lie beside its name."""
    return len(list(path.parent.glob(f"{path.stem}-*-of-*.gguf")))
