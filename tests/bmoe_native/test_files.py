"""Files that are cut, split, misnamed or no language models: refused in a sentence that names them."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, ModelError
from tests import tiny


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "whole.gguf", arch="qwen3moe")


@pytest.mark.parametrize("where", ["empty", "magic", "metadata", "tensor table", "data", "last byte"])
def test_cut_files(whole: Path, where: str) -> None:
    size = whole.stat().st_size
    data = gguf.GGUFReader(whole).tensors[0].data_offset
    cut = {
        "empty": 0,
        "magic": 3,
        "metadata": 600,
        "tensor table": data - 200,
        "data": size // 2,
        "last byte": size - 1,
    }
    os.truncate(whole, cut[where])
    with pytest.raises(ModelError, match=rf"whole\.gguf.* {cut[where]}\b"):
        Engine.open(whole)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("these are notes")
    for path, why in [(text, "not a GGUF"), (tmp_path, "not a regular file"), (tmp_path / "no.gguf", "No such file")]:
        with pytest.raises(ModelError, match=why):
            Engine.open(path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)  # so that opening it for reading does not wait
    with pytest.raises(ModelError, match="not a regular file"):
        Engine.open(fifo)
    os.close(writer)


def logits_of(path: Path) -> np.ndarray:
    with Engine.open(path) as engine:
        engine.prefill([1, 2, 3])
        return engine.logits()


def test_split_models_open_by_their_first_shard(tmp_path: Path, whole: Path) -> None:
    first = tiny.write(tmp_path / "split.gguf", arch="qwen3moe", tensors_per_shard=12)
    with Engine.open(first) as engine, Engine.open(whole) as one:
        assert engine.info.n_shards == 4
        assert engine.info.weights_bytes == one.info.weights_bytes
        assert engine.info.experts_bytes == one.info.experts_bytes > 0
        assert (engine.info.n_expert, engine.info.n_expert_used, engine.info.n_moe_layer) == (8, 2, 3)
    np.testing.assert_array_equal(logits_of(first), logits_of(whole))
    link = tmp_path / "link.gguf"
    link.symlink_to(first)
    np.testing.assert_array_equal(logits_of(link), logits_of(whole))


def test_split_models_that_are_not_whole(tmp_path: Path) -> None:
    first = tiny.write(tmp_path / "split.gguf", arch="qwen3moe", tensors_per_shard=12)
    second, third = (tmp_path / f"split-0000{n}-of-00004.gguf" for n in (2, 3))
    with pytest.raises(ModelError, match=r"shard 2 of 4.*split-00001-of-00004\.gguf"):
        Engine.open(second)
    third.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"split-00003-of-00004\.gguf: No such file"):
        Engine.open(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="-00001-of-00004"):
        Engine.open(renamed)


def small_gguf(path: Path, arch: str, **fields: str | bool | int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    if fields.get("general__type") != "vocab":
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    else:
        writer.add_string("general.name", "words only")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "fields", "why"),
    [
        ("llama", {"general__type": "adapter"}, "adapter"),
        ("clip", {"general__type": "mmproj"}, "multimodal projector"),
        ("llama", {"general__type": "vocab"}, "not a model by its own word"),
        ("bert", {"bert__attention__causal": False}, "encoder"),
        ("qwen3", {"qwen3__pooling_type": 3}, "embedding model"),
        ("nonesuch", {}, "nonesuch"),
        ("llama", {}, "llama.cpp cannot load"),
    ],
)
def test_ggufs_that_are_no_language_models(
    tmp_path: Path, arch: str, fields: dict[str, str | bool | int], why: str
) -> None:
    path = small_gguf(tmp_path / "other.gguf", arch, **fields)
    with pytest.raises(ModelError, match=why):
        Engine.open(path)


def test_a_file_with_only_a_vocabulary(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    tiny.add_vocabulary(writer, template=None, bos=False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="only a vocabulary"):
        Engine.open(tmp_path / "vocab.gguf")


@pytest.mark.parametrize("name", [b"with blanks.gguf", "Grüße 模型.gguf".encode(), b"not \xff\xfe utf8.gguf"])
def test_paths_open_whatever_their_bytes(whole: Path, name: bytes) -> None:
    there = os.path.join(os.fsencode(whole.parent), name)
    os.link(whole, there)
    Engine.open(there, inspect=True).close()
    os.truncate(there, 700)
    with pytest.raises(ModelError) as error:
        Engine.open(there)
    shown = str(error.value)
    assert shown.isprintable() and os.fsdecode(name).split(".")[0][:4] in shown


def test_a_path_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(ArgumentError, match="zero byte"):
        Engine.open("a\0b")


def test_a_prefill_device_with_a_zero_byte_is_refused(whole: Path) -> None:
    with pytest.raises(ArgumentError, match="prefill_device holds a zero byte"):
        Engine.open(whole, prefill_device="CPU\0b")


def test_a_context_beyond_the_training_is_refused_with_both_numbers(whole: Path) -> None:
    with pytest.raises(ArgumentError, match=r"513.*512"):
        Engine.open(whole, n_ctx=513)
    with pytest.raises(ArgumentError, match=r"4294967296"):
        Engine.open(whole, n_ctx=2**32)


def test_a_kv_cache_that_cannot_fit_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "huge.gguf", n_ctx_train=2**31 - 1)
    with pytest.raises(MemoryError, match=r"MiB of KV cache"):
        Engine.open(path, n_ctx=2**31 - 1)


@pytest.mark.parametrize(
    ("arch", "key", "value", "why"),
    [
        ("qwen3moe", "qwen3moe.expert_used_count", 9, "uses 9 of 8 experts"),
        ("qwen3moe", "qwen3moe.expert_used_count", 0, "uses 0 of 8 experts"),
        ("qwen3moe", "qwen3moe.expert_used_count", None, "uses 0 of 8 experts"),
        ("qwen3moe", "qwen3moe.expert_count", None, "uses 2 of 0 experts"),
        ("llama", "llama.block_count", 513, "513 layers, possible are 1 to 512"),
        ("llama", "llama.block_count", 0, "0 layers, possible are 1 to 512"),
        ("llama", "tokenizer.ggml.tokens", ["&", "a", "&"], "vocabulary holds .&. twice"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", -1.0, "layer_norm_rms_epsilon is -1"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon is nan"),
        ("qwen3next", "qwen3next.rope.dimension_count", 0, "turn 0 dimensions of a head"),
        ("qwen3next", "qwen3next.rope.dimension_count", 3, "turn 3 of a head's 16"),
        ("qwen3next", "qwen3next.rope.dimension_count", 18, "turn 18 of a head's 16"),
        ("gemma4", "gemma4.rope.dimension_count_swa", 34, "turn 34 of a head's"),
        ("gemma4", "gemma4.rope.dimension_count_swa", None, "turn 32 of a head's 16"),
        ("qwen35moe", "qwen35moe.rope.dimension_sections", [16, 1, 0, 0], "do not fit a head's 16"),
        ("qwen35moe", "qwen35moe.rope.dimension_sections", [0, 0, 0, 0], "do not fit a head's 16"),
        ("qwen35moe", "qwen35moe.rope.dimension_sections", [3, -1, 0, 0], "do not fit a head's 16"),
        ("qwen35moe", "qwen35moe.full_attention_interval", 0, "full_attention_interval is 0"),
        # llama.cpp sees these, by an assertion.
        ("gemma4", "gemma4.attention.value_length", 48, r"create a context .* GGML_ASSERT\(n_embd_head == "),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    tmp_path: Path, arch: str, key: str, value: object, why: str
) -> None:
    def contradict(writer: gguf.GGUFWriter) -> None:
        entry = writer.kv_data[0].pop(key)
        if value is not None:
            entry.value = value
            writer.kv_data[0][key] = entry

    path = tiny.write(tmp_path / "m.gguf", arch=arch, edit=contradict)
    with pytest.raises(ModelError, match=why):
        Engine.open(path)


def test_heads_of_one_dimension_need_no_positions(tmp_path: Path) -> None:
    """As a recurrent model may say it has."""

    def one_each(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["mamba.attention.head_count"].value = 64

    with Engine.open(tiny.write(tmp_path / "m.gguf", arch="mamba", edit=one_each)) as engine:
        engine.prefill([1, 2, 3])


def test_a_model_without_positions_may_say_so(tmp_path: Path) -> None:
    path = tiny.write(
        tmp_path / "m.gguf", arch="mamba", edit=lambda writer: writer.add_uint32("mamba.rope.dimension_count", 0)
    )
    with Engine.open(path) as engine:
        engine.prefill([1, 2, 3])


@pytest.mark.parametrize(
    ("arch", "tensor", "kind"),
    [
        ("qwen3moe", "blk.0.attn_q.weight", "i32"),
        ("qwen3moe", "blk.0.attn_norm.weight", "i32"),
        ("qwen3moe", "output.weight", "q8_1"),
        ("gpt-oss", "blk.0.ffn_gate_inp.bias", "bf16"),
        ("qwen3next", "blk.0.ssm_a", "f16"),
    ],
)
def test_tensors_of_a_type_that_nothing_computes_with(tmp_path: Path, arch: str, tensor: str, kind: str) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=arch)
    [found] = [one for one in gguf.GGUFReader(path).tensors if one.name == tensor]
    number = gguf.GGMLQuantizationType[kind.upper()]
    with path.open("r+b") as file:
        file.seek(found.field.offset + sum(part.nbytes for part in found.field.parts[:-2]))
        file.write(struct.pack("<I", number))
    with pytest.raises(ModelError, match=f"{tensor} cannot be of type {kind}"):
        Engine.open(path)
