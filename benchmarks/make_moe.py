"""Write a Mixture-of-Experts GGUF of any size that means nothing and costs what a real one costs.

Its shape is Qwen3-30B-A3B's (`qwen3moe`), its tensor types those of a Q4_K_M file, its weights random blocks. For
memory, reads and time that is as good as the real file; what has to be made on purpose is the routing, because a random
router calls on nearly all experts within a few dozen tokens, and a trained one does not.

Routing. Hidden states hold a few orthogonal directions of the space: one common to all tokens, one for each topic. A
token is half noise, and half the common direction and that of its topic. A router's row is noise too, and a liking
for each direction. So an expert's logit for a token is, up to a factor,

    N(0, 1) of the token's own  +  skew * (sqrt(1 - topical) * N(0, 1) of the expert
                                           + sqrt(topical) * N(0, 1) of the expert and the topic)

`skew` sets how few experts do most of the work, `topical` how much of their popularity belongs to one topic only.

Prompts. Runs of words of one topic: two of one topic are two requests of one application, two of different topics have
nothing to do with one another. Each file, p<tokens>-<topic>-<number>.txt, holds exactly the tokens it is named after.
The model's chat template passes a user's message on as it is, so that a session adds none.

All of it is a function of the arguments and the tokenizer, on one machine with one version of numpy. What comes of it
is counted by benchmarks/cache_policies.py.

    python benchmarks/make_moe.py bench24.gguf --layers 24 --prompts prompts
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from bmoe.models import default_cache, resolve
from bmoe_native import Engine

HEAD = 128
EPSILON = 1e-6
TEMPLATE = "{{ messages[-1]['content'] }}"
CHUNK_BYTES = 16 << 20  # of a tensor, made and written at a time
MARGIN_BYTES = 16 << 20  # for the vocabulary and the prompts
SPACE = "\u0120"  # how a byte-level vocabulary writes it
SHORTEST_WORD = 2

# What a stream of random numbers is for: streams that differ in any part are independent.
TENSOR, TOPICS, DIRECTIONS, PROMPT = range(4)

Chunks = Iterator[Any]  # arrays whose bytes follow one another in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    n_layer: int
    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    n_topic: int
    skew: float
    topical: float  # 0..1


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # [..., out, in]
    type: Type
    make: Callable[[np.random.SeedSequence], Chunks]

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size


def seeded(seed: int, *purpose: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, *purpose])


def generator(seeds: np.random.SeedSequence) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seeds))


# Random blocks. All bytes are random but the scales, in half precision: every bit pattern of the rest is valid.


def moments(values: range) -> tuple[float, float]:
    """Mean, and mean of squares, of a number drawn from values."""
    array = np.asarray(values, np.float64)
    return float(array.mean()), float((array**2).mean())


def q4_k_scales(std: float) -> tuple[float, float]:
    """(d, dmin) with which the weights d * scale * q - dmin * min have mean 0 and this standard deviation."""
    (scale, scale_2), (q, q_2) = moments(range(64)), moments(range(16))  # the mins are drawn as the scales are
    variance = scale_2 * q_2 - (scale * q) ** 2 + q**2 * (scale_2 - scale**2)
    d = std / math.sqrt(variance)
    return d, d * q


def q6_k_scale(std: float) -> float:
    """The d with which the weights d * scale * q have this standard deviation."""
    return std / math.sqrt(moments(range(-128, 128))[1] * moments(range(-32, 32))[1])


def random_blocks(kind: Type, n_bytes: int, std: float, seeds: np.random.SeedSequence) -> Chunks:
    """Blocks of a quantized tensor whose weights have mean 0 and this standard deviation."""
    scales = {Type.Q4_K: (0, q4_k_scales(std)), Type.Q6_K: (208, (q6_k_scale(std),))}  # where in a block they lie
    at, values = scales[kind]
    halves = np.asarray(values, "<f2").view(np.uint8)
    block = gguf.GGML_QUANT_SIZES[kind][1]
    bits = np.random.SFC64(seeds)
    step = CHUNK_BYTES // block * block
    for begin in range(0, n_bytes, step):
        size = min(step, n_bytes - begin)
        words = bits.random_raw(-(-size // 8)).astype("<u8", copy=False)
        chunk = words.view(np.uint8)[:size].reshape(-1, block)
        chunk[:, at : at + len(halves)] = halves
        yield chunk


# What makes the routing.


def directions(seed: int, n_topic: int, n_embd: int) -> Any:
    """Orthogonal directions, the common one and then each topic's: float32 [1 + n_topic, n_embd], of unit variance."""
    drawn = generator(seeded(seed, DIRECTIONS)).standard_normal((n_embd, 1 + n_topic))
    return np.float32(math.sqrt(n_embd) * np.linalg.qr(drawn)[0].T)


def topics(seed: int, n_topic: int, n_vocab: int) -> Any:
    """The topic of each token: int64 [n_vocab]."""
    return generator(seeded(seed, TOPICS)).integers(0, n_topic, n_vocab)


def embeddings(of: Any, basis: Any, topical: float, seeds: np.random.SeedSequence) -> Chunks:
    """A row in Q8_0 for each token, whose topics are `of`."""
    random = generator(seeds)
    leads = np.float32(math.sqrt(1 - topical) * basis[:1] + math.sqrt(topical) * basis[1:])
    step = CHUNK_BYTES // (4 * basis.shape[1])
    for begin in range(0, len(of), step):
        part = of[begin : begin + step]
        noise = random.standard_normal((len(part), basis.shape[1]), np.float32)
        yield gguf.quants.quantize((noise + leads[part]) / np.float32(math.sqrt(2)), Type.Q8_0)


def router(n_expert: int, basis: Any, skew: float, seeds: np.random.SeedSequence) -> Chunks:
    """A router's rows. On states of unit variance their logits have about the variance (1 + skew²) / 2.

    The liking for a direction is divided by the square root of the width, over which it adds up. The noise is made
    orthogonal to the directions, or it would be a liking of its own: a skew of 1 where none was asked for.
    """
    random = generator(seeds)
    n_embd = basis.shape[1]
    noise = random.standard_normal((n_expert, n_embd), np.float32)
    noise -= noise @ basis.T @ basis / np.float32(n_embd)
    liking = skew / math.sqrt(n_embd) * random.standard_normal((n_expert, len(basis)), np.float32)
    yield np.float32((noise + liking @ basis) / math.sqrt(n_embd))


# The file.


def tensors(shape: Shape, routing: Routing, n_vocab: int, seed: int) -> Iterator[Tensor]:
    """All tensors in the order of the file."""
    embd, ff, n_expert = shape.n_embd, shape.n_ff, shape.n_expert
    basis = directions(seed, routing.n_topic, embd)
    of = topics(seed, routing.n_topic, n_vocab)
    # The experts of all layers together add about half of the embedding's variance: what one makes is a product, and
    # n_used of them are averaged. Attention adds less. Over a long prompt it is the mean of the values, nearly the same
    # for all tokens of a topic, and would make the deeper layers prefer few experts whatever the skew.
    gain_attention, gain_experts = 0.5 / math.sqrt(2 * shape.n_layer), 2 / math.sqrt(2 * shape.n_layer)

    def weights(name: str, *dimensions: int, kind: Type = Type.Q4_K, gain: float = 1.0) -> Tensor:
        std = gain / math.sqrt(dimensions[-1])
        n_bytes = Tensor(name, dimensions, kind, lambda seeds: iter(())).n_bytes
        return Tensor(name, dimensions, kind, lambda seeds: random_blocks(kind, n_bytes, std, seeds))

    def norm(name: str, size: int) -> Tensor:
        return Tensor(name, (size,), Type.F32, lambda seeds: iter([np.ones(size, np.float32)]))

    yield Tensor(
        "token_embd.weight", (n_vocab, embd), Type.Q8_0, lambda seeds: embeddings(of, basis, routing.topical, seeds)
    )
    yield norm("output_norm.weight", embd)
    yield weights("output.weight", n_vocab, embd, kind=Type.Q6_K)
    for layer in range(shape.n_layer):
        at = f"blk.{layer}."
        yield norm(at + "attn_norm.weight", embd)
        yield weights(at + "attn_q.weight", shape.n_head * HEAD, embd)
        yield weights(at + "attn_k.weight", shape.n_head_kv * HEAD, embd)
        yield weights(at + "attn_v.weight", shape.n_head_kv * HEAD, embd)
        yield norm(at + "attn_q_norm.weight", HEAD)
        yield norm(at + "attn_k_norm.weight", HEAD)
        yield weights(at + "attn_output.weight", embd, shape.n_head * HEAD, gain=gain_attention)
        yield norm(at + "ffn_norm.weight", embd)
        yield Tensor(
            at + "ffn_gate_inp.weight",
            (n_expert, embd),
            Type.F32,
            lambda seeds: router(n_expert, basis, routing.skew, seeds),
        )
        yield weights(at + "ffn_gate_exps.weight", n_expert, ff, embd)
        yield weights(at + "ffn_up_exps.weight", n_expert, ff, embd)
        down = Type.Q6_K if layer % 2 else Type.Q4_K
        yield weights(at + "ffn_down_exps.weight", n_expert, embd, ff, kind=down, gain=gain_experts)


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, tokenizer: gguf.GGUFReader) -> None:
    writer.add_type("model")
    writer.add_name("synthetic mixture of experts")
    writer.add_context_length(32768)
    writer.add_block_count(shape.n_layer)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_used)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, field in tokenizer.fields.items():
        if key.startswith("tokenizer.ggml.") and key != "tokenizer.ggml.add_bos_token":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_model(path: Path, shape: Shape, routing: Routing, tokenizer: gguf.GGUFReader, seed: int) -> int:
    """Write the model, tensor by tensor, and return its size in bytes. Under its name there is a whole file or none.

    Raises: SystemExit where the disk has no room for it.
    """
    n_vocab = len(tokenizer.fields["tokenizer.ggml.tokens"].data)
    planned = list(tensors(shape, routing, n_vocab, seed))
    total = sum(tensor.n_bytes for tensor in planned)
    free = shutil.disk_usage(path.parent).free
    if free < total + MARGIN_BYTES:
        raise SystemExit(
            f"{path.parent} has {free / 1e9:.2f} GB free, and the model needs {(total + MARGIN_BYTES) / 1e9:.2f}"
        )
    unfinished = path.with_name(path.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    add_metadata(writer, shape, tokenizer)
    for tensor in planned:
        # As bytes, or the writer takes the type from the array's.
        rows = (*tensor.shape[:-1], tensor.n_bytes // math.prod(tensor.shape[:-1]))
        writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), tensor.n_bytes, raw_dtype=tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        done = 0
        for index, tensor in enumerate(planned):
            begin = file.tell()
            for chunk in tensor.make(seeded(seed, TENSOR, index)):
                file.write(chunk.data)
            assert file.tell() - begin == tensor.n_bytes, tensor.name
            writer.write_padding(file, tensor.n_bytes)
            done += tensor.n_bytes
            print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr)
        print(file=sys.stderr)
        file.flush()
        os.fsync(file.fileno())
        n_bytes = file.tell()
        unfinished.replace(path)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)
    return n_bytes


# The prompts.


def word_tokens(engine: Engine, vocabulary: list[str]) -> list[int]:
    """Tokens that are a word with the space before it, and that this text is tokenized to."""
    return [
        token
        for token, text in enumerate(vocabulary)
        if text.startswith(SPACE)
        and len(text) > SHORTEST_WORD
        and (word := text.removeprefix(SPACE)).isascii()
        and word.isalpha()
        and word.islower()
        and engine.tokenize(f" {word}") == [token]
    ]


def write_prompts(
    folder: Path, engine: Engine, vocabulary: list[str], routing: Routing, lengths: list[int], count: int, seed: int
) -> int:
    """Write `count` prompts of each topic and length; returns how many that is.

    Raises: SystemExit where a topic has no words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = np.asarray(word_tokens(engine, vocabulary), np.int64)
    of = topics(seed, routing.n_topic, len(vocabulary))
    for topic in range(routing.n_topic):
        own = words[of[words] == topic]
        if not len(own):
            raise SystemExit(f"the tokenizer has {len(words)} words, and none for topic {topic} of {routing.n_topic}")
        for length in lengths:
            for number in range(count):
                drawn = generator(seeded(seed, PROMPT, topic, length, number)).choice(own, length)
                text = "".join(f" {vocabulary[token].removeprefix(SPACE)}" for token in drawn)
                if engine.tokenize(text) != drawn.tolist():
                    raise SystemExit("the tokenizer joins words to one another: exact prompts cannot be written")
                (folder / f"p{length}-{topic}-{number}.txt").write_text(text)
    return routing.n_topic * len(lengths) * count


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="GGUF to write; left out, only the prompts are written")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="GGUF or named model to take it from")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--used", type=int, default=8, help="experts of each token")
    parser.add_argument("--embd", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=768, help="width of an expert")
    parser.add_argument("--heads", type=int, default=32, help=f"of {HEAD}")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--topics", type=int, default=8)
    parser.add_argument("--skew", type=float, default=1.4, help="how much some experts are preferred; 0: not at all")
    parser.add_argument("--topical", type=float, default=0.5, help="how much of that depends on the topic, 0..1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, help="folder to write prompts to")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[70, 280])
    parser.add_argument("--prompt-count", type=int, default=4, help="of each topic and length")
    options = parser.parse_args(arguments)
    if options.embd % 256 or options.ffn % 256:
        parser.error("--embd and --ffn have to be multiples of 256, a block of Q4_K")
    if not 0 < options.used <= options.experts:
        parser.error("--used has to be one of 1 to --experts")
    if options.kv_heads < 1 or options.heads < 1 or options.heads % options.kv_heads:
        parser.error("--heads has to be a multiple of --kv-heads")
    if not 0 < options.topics < options.embd or not 0 <= options.topical <= 1 or options.layers < 1 or options.seed < 0:
        parser.error("--topics, --topical, --layers or --seed is out of range")
    if options.model is None and options.prompts is None:
        parser.error("neither a model nor --prompts to write")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    source = resolve(options.tokenizer, default_cache())
    tokenizer = gguf.GGUFReader(source)
    routing = Routing(n_topic=options.topics, skew=options.skew, topical=options.topical)
    if options.prompts is not None:
        vocabulary = tokenizer.fields["tokenizer.ggml.tokens"].contents()
        with Engine.open(source, inspect=True) as engine:
            n_prompts = write_prompts(
                options.prompts,
                engine,
                vocabulary,
                routing,
                options.prompt_tokens,
                options.prompt_count,
                options.seed,
            )
        print(f"{options.prompts}: {n_prompts} prompts")
    if options.model is not None:
        shape = Shape(
            n_layer=options.layers,
            n_expert=options.experts,
            n_used=options.used,
            n_embd=options.embd,
            n_ff=options.ffn,
            n_head=options.heads,
            n_head_kv=options.kv_heads,
        )
        began = time.perf_counter()
        n_bytes = write_model(options.model, shape, routing, tokenizer, options.seed)
        seconds = time.perf_counter() - began
        print(f"{options.model}: {n_bytes} bytes in {seconds:.1f} s, {n_bytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
