"""A Mixture-of-Experts GGUF made of a dense one: its FFN as each of the experts, and a router drawn at random."""

import fcntl
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bmoe.decide.types import Refused

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderField, ReaderTensor

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all), rising."""
_Bytes = npt.NDArray[np.uint8]
_Chunks = Callable[[], Iterator[_Bytes]]

SOURCES = ("llama", "qwen2")
TARGET = "llama"  # its layers with experts take biases of attention, and normalise the weights of the experts chosen
MAX_EXPERTS = 1024  # llama.cpp asserts it
SPARE_BYTES = 16 * 1024 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
CHUNK_WEIGHTS = 4 * 1024 * 1024  # float32, and a few copies of them while they are quantized
ALIGNMENT = 32
_UINT32, _STRING = 4, 8  # types of values in a GGUF
_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
_LAYER_TENSOR = re.compile(
    r"blk\.(\d+)\.((?:attn_norm|ffn_norm|ffn_gate|ffn_up|ffn_down|attn_output|attn_[qkv])\.weight|attn_(?:[qkv]|output)\.bias)"
)
_OTHER_TENSORS = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
_SHARD = re.compile(r"-00001-of-(\d{5})\.gguf$")
# Types that gguf writes as well as it reads. Weights of another get the first below that has as many bits.
_WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_INSTEAD = ("Q4_1", "Q5_1", "Q8_0")


class UpcycleError(OSError):
    """What is to be read cannot be, or what is to be written, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcycleRequest:
    source: Path
    target: Path
    n_expert: int
    n_expert_used: int
    noise: float = 0.0  # standard deviation of an expert's weights, relative to each weight
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n_expert <= MAX_EXPERTS:
            raise Refused(f"there can be 1 to {MAX_EXPERTS} experts, not {self.n_expert}")
        if not 1 <= self.n_expert_used <= self.n_expert:
            raise Refused(f"of {self.n_expert} experts a token can use 1 to {self.n_expert}, not {self.n_expert_used}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise Refused(f"the noise must be 0 or more, not {self.noise}")
        if self.seed < 0:
            raise Refused(f"the seed must be 0 or more, not {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycled:
    path: Path
    size_bytes: int
    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_types: tuple[str, ...]  # of the experts' weights, sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor of the output: what its header says, and its bytes in pieces."""

    name: str
    shape: tuple[int, ...]  # the row's length first, as in the file
    type: "GGMLQuantizationType"
    n_bytes: int
    chunks: _Chunks


def upcycle(request: UpcycleRequest, on_progress: Progress | None = None) -> Upcycled:
    """Write the model, whole or not at all; only a few MB of it are in memory at any time.

    Raises: Refused; UpcycleError, or another OSError. Nothing is left behind then, nor after an interrupt.
    """
    _check_target(request)
    dense = _Dense(request.source)
    if any(request.target.exists() and request.target.samefile(path) for path in dense.paths):
        raise Refused(f"{request.target} is what is read; give another name for what is written")
    tensors = list(_planned(dense, request))
    header = _header(_metadata(dense, tensors, request), tensors)
    size_bytes = len(header) + sum(_padded(tensor.n_bytes) for tensor in tensors)
    with _written_whole(request) as file:
        _check_room(request.target, size_bytes)
        done = file.write(header)
        for tensor in tensors:
            for chunk in tensor.chunks():
                done += file.write(chunk.data)
                if on_progress is not None:
                    on_progress(done, size_bytes)
            done += file.write(bytes(_padded(tensor.n_bytes) - tensor.n_bytes))
    return Upcycled(
        path=request.target,
        size_bytes=size_bytes,
        n_layer=dense.n_layer,
        n_expert=request.n_expert,
        n_expert_used=request.n_expert_used,
        expert_types=tuple(sorted({tensor.type.name for tensor in tensors if "_exps." in tensor.name})),
    )


class _Dense:
    """The dense model: its metadata and tensors, and where they lie in its files.

    Raises: Refused, for what is no dense model of a known family; UpcycleError, for what cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths = _shards(path)
        readers = [_reader(shard) for shard in self.paths]
        self.fields = {name: field for name, field in readers[0].fields.items() if not name.startswith("GGUF.")}
        self._head = readers[0].data
        self.arch = self._value("general.architecture")
        n_shard = self._value("split.count") or 1
        if n_shard != len(readers):
            raise Refused(f"{path} is one of {n_shard} files: give the first of them, named as it was when split")
        self._check_arch()
        self.tensors: dict[str, tuple[ReaderTensor, GGUFReader]] = {}
        for reader in readers:
            for tensor in reader.tensors:
                self.tensors[tensor.name] = (tensor, reader)
        self.n_layer = self.number("block_count")
        self._check_tensors()

    def number(self, key: str) -> int:
        """A number of the architecture's."""
        value = self._value(f"{self.arch}.{key}")
        if not isinstance(value, int) or value < 1:
            raise Refused(f"{self.path} gives no single number as {self.arch}.{key}")
        return value

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.fields

    def text(self, key: str) -> str | None:
        value = self._value(key)
        return value if isinstance(value, str) else None

    def raw_value(self, key: str) -> bytes:
        """Type and value as they are in the file."""
        field = self.fields[key]
        n_bytes = sum(int(part.nbytes) for part in field.parts)
        return self._head[field.offset + 8 + len(key.encode()) : field.offset + n_bytes].tobytes()

    def rows(self, name: str) -> _Bytes:
        """A tensor's bytes, mapped and not yet read: [n_rows, bytes of a row]."""
        tensor, reader = self.tensors[name]
        raw = reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        return raw.reshape(math.prod(tensor.shape[1:].tolist()), -1)

    def _value(self, key: str) -> Any:
        field: ReaderField | None = self.fields.get(key)
        return None if field is None else field.contents()

    def _check_arch(self) -> None:
        n_expert = self._value(f"{self.arch}.expert_count")
        if n_expert:
            raise Refused(f"{self.path} is a Mixture-of-Experts model already, of {n_expert} experts")
        if self.arch not in SOURCES:
            raise Refused(f"{self.path} is of the family {self.arch}; only {' and '.join(SOURCES)} can be upcycled")

    def _check_tensors(self) -> None:
        for name in self.tensors:
            found = _LAYER_TENSOR.fullmatch(name)
            if name not in _OTHER_TENSORS and (found is None or int(found[1]) >= self.n_layer):
                raise Refused(f"{self.path} has a tensor that would be lost or misread in an upcycled model: {name}")
        for layer in range(self.n_layer):
            for part in ("ffn_norm", *_PARTS):
                name = f"blk.{layer}.{part}.weight"
                if name not in self.tensors:
                    raise Refused(f"{self.path} is incomplete: there is no {name}")
                if part in _PARTS and len(self.tensors[name][0].shape) != 2:
                    raise Refused(f"{self.path} is damaged: {name} is no matrix")


def _planned(dense: _Dense, request: UpcycleRequest) -> Iterator[_Tensor]:
    """The output's tensors, in the order of the input's."""
    order = _interleaved(dense) if dense.arch != TARGET else None
    for name, (tensor, _) in dense.tensors.items():
        found = _LAYER_TENSOR.fullmatch(name)
        layer, part = (int(found[1]), found[2].partition(".")[0]) if found else (-1, name)
        if part == "ffn_gate":
            yield _router(dense, request, layer)
        if part in _PARTS:
            yield _experts(dense, request, layer, part)
        else:
            rotated = order if part in ("attn_q", "attn_k") else None
            shape = tuple(tensor.shape.tolist())
            if rotated is not None and shape[-1] % len(rotated):
                raise Refused(f"{dense.path} is damaged: of {name} the {shape[-1]} rows are no heads of {len(rotated)}")
            chunks = _copied(dense, name, rotated)
            yield _Tensor(name=name, shape=shape, type=tensor.tensor_type, n_bytes=int(tensor.n_bytes), chunks=chunks)


def _interleaved(dense: _Dense) -> npt.NDArray[np.intp]:
    """Which of a head's rows comes where, for a family that rotates row i with row i + 1 instead of i + head/2."""
    head = dense.number("embedding_length") // dense.number("attention.head_count")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if dense.has(key) and dense.number(key) != head:
            raise Refused(
                f"{dense.path} has heads of {head} and {dense.arch}.{key} {dense.number(key)}; they must agree"
            )
    half = np.arange(head // 2)
    return np.stack([half, half + head // 2], axis=1).ravel()


def _copied(dense: _Dense, name: str, order: npt.NDArray[np.intp] | None) -> _Chunks:
    """A tensor as it is; with an order, each head's rows in that one."""

    def chunks() -> Iterator[_Bytes]:
        rows = dense.rows(name)
        if order is not None:
            tensor, _ = dense.tensors[name]
            heads = rows.reshape(int(tensor.shape[-1]) // len(order), len(order), -1)
            rows = heads[:, order].reshape(rows.shape)
        yield from _in_chunks(rows.reshape(-1))

    return chunks


def _router(dense: _Dense, request: UpcycleRequest, layer: int) -> _Tensor:
    """Random projections of what the FFN reads, scaled by the size that its norm gives it: logits vary by about 1.

    Each projection serves as many experts as have to be chosen together.
    """
    from gguf import GGMLQuantizationType

    n_embd = dense.number("embedding_length")
    norm = _decoded(dense, f"blk.{layer}.ffn_norm.weight", slice(None)).ravel()
    size = float(np.linalg.norm(norm)) or 1.0
    together = _chosen_together(request)

    def chunks() -> Iterator[_Bytes]:
        drawn = _random(request, layer, 0, 0).standard_normal((request.n_expert // together, n_embd))
        yield (drawn / size).astype(np.float32).repeat(together, axis=0).view(np.uint8).reshape(-1)

    return _Tensor(
        name=f"blk.{layer}.ffn_gate_inp.weight",
        shape=(n_embd, request.n_expert),
        type=GGMLQuantizationType.F32,
        n_bytes=4 * n_embd * request.n_expert,
        chunks=chunks,
    )


def _chosen_together(request: UpcycleRequest) -> int:
    """How many experts share a router row, so that they are chosen together and weigh the same.

    Where equal experts weigh 1/2 or 1/4 each, their sum is one of them to the last bit. Any other weights round it,
    and behind quantized weights that moves probabilities by some 0.05.
    """
    n_used = request.n_expert_used
    is_exact = n_used & (n_used - 1) == 0 and request.n_expert % n_used == 0
    return n_used if is_exact and not request.noise else 1


def _experts(dense: _Dense, request: UpcycleRequest, layer: int, part: str) -> _Tensor:
    """One matrix of the FFN as those of all experts."""
    name = f"blk.{layer}.{part}.weight"
    tensor, _ = dense.tensors[name]
    row, n_rows = map(int, tensor.shape)
    type_ = _written_type(tensor.tensor_type) if request.noise else tensor.tensor_type
    if request.noise:
        _decoded(dense, name, slice(1))  # refuses what cannot be

    def chunks() -> Iterator[_Bytes]:
        for expert in range(request.n_expert):
            if request.noise:
                random = _random(request, layer, 1 + _PARTS.index(part), expert)
                yield from _noisy(dense, name, type_, request.noise, random)
            else:
                yield from _in_chunks(dense.rows(name).reshape(-1))

    return _Tensor(
        name=f"blk.{layer}.{part}_exps.weight",
        shape=(row, n_rows, request.n_expert),
        type=type_,
        n_bytes=request.n_expert * n_rows * _row_bytes(row, type_),
        chunks=chunks,
    )


def _noisy(
    dense: _Dense, name: str, type_: "GGMLQuantizationType", noise: float, random: np.random.Generator
) -> Iterator[_Bytes]:
    from gguf import quants

    tensor, _ = dense.tensors[name]
    row, n_rows = map(int, tensor.shape)
    step = max(1, CHUNK_WEIGHTS // row)
    for first in range(0, n_rows, step):
        weights = _decoded(dense, name, slice(first, first + step))
        factors = 1 + np.float32(noise) * random.standard_normal(weights.shape, np.float32)
        yield np.ascontiguousarray(quants.quantize(weights * factors, type_)).view(np.uint8).reshape(-1)


def _decoded(dense: _Dense, name: str, rows: slice) -> npt.NDArray[np.float32]:
    """Some of a tensor's rows as float32.

    Raises: Refused, for a type that gguf cannot read.
    """
    from gguf import quants

    tensor, _ = dense.tensors[name]
    try:
        return np.asarray(quants.dequantize(np.asarray(dense.rows(name)[rows]), tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise Refused(f"{name} is of type {tensor.tensor_type.name}, which the gguf package cannot read") from error


def _written_type(type_: "GGMLQuantizationType") -> "GGMLQuantizationType":
    from gguf import GGMLQuantizationType

    if type_.name in _WRITTEN:
        return type_
    others = [GGMLQuantizationType[name] for name in _INSTEAD]
    return next((other for other in others if _bits(other) >= _bits(type_)), others[-1])


def _bits(type_: "GGMLQuantizationType") -> float:
    from gguf import GGML_QUANT_SIZES

    n_weights, n_bytes = GGML_QUANT_SIZES[type_]
    return 8 * n_bytes / n_weights


def _row_bytes(n_weights: int, type_: "GGMLQuantizationType") -> int:
    from gguf import GGML_QUANT_SIZES

    block, n_bytes = GGML_QUANT_SIZES[type_]
    return n_weights // block * n_bytes


def _random(request: UpcycleRequest, *which: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(request.seed, spawn_key=which))


def _metadata(dense: _Dense, tensors: list[_Tensor], request: UpcycleRequest) -> dict[str, bytes]:
    """The dense model's, under the new family's name, and what the experts add."""
    from gguf import LlamaFileType

    values: dict[str, bytes] = {}
    for key in dense.fields:
        # Of how many files and weights it was made is not so any more.
        if not key.startswith("split.") and key not in ("general.parameter_count", "general.alignment"):
            values[re.sub(rf"^{dense.arch}\.", f"{TARGET}.", key)] = dense.raw_value(key)
    values["general.architecture"] = _string(TARGET)
    label = dense.text("general.size_label")
    if label:
        values["general.size_label"] = _string(f"{request.n_expert}x{label}")
    values[f"{TARGET}.expert_count"] = _uint32(request.n_expert)
    values[f"{TARGET}.expert_used_count"] = _uint32(request.n_expert_used)
    gate = "blk.0.ffn_gate"
    gate_type = next(tensor.type for tensor in tensors if tensor.name == f"{gate}_exps.weight")
    if gate_type != dense.tensors[f"{gate}.weight"][0].tensor_type:
        values["general.file_type"] = _uint32(LlamaFileType[f"MOSTLY_{gate_type.name}"])
    return values


def _header(metadata: dict[str, bytes], tensors: list[_Tensor]) -> bytes:
    """All that comes before the first tensor's bytes."""
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _counted(key) + value
    offset = 0
    for tensor in tensors:
        out += _counted(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        out += struct.pack("<IQ", tensor.type, offset)
        offset += _padded(tensor.n_bytes)
    return bytes(out.ljust(_padded(len(out)), b"\0"))


def _counted(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _counted(text)


def _uint32(value: int) -> bytes:
    return struct.pack("<II", _UINT32, value)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _in_chunks(data: _Bytes) -> Iterator[_Bytes]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield np.ascontiguousarray(data[at : at + CHUNK_BYTES])


def _shards(path: Path) -> list[Path]:
    found = _SHARD.search(path.name)
    if found is None:
        return [path]
    stem, n_shard = path.name[: found.start()], int(found[1])
    return [path.with_name(f"{stem}-{index:05d}-of-{found[1]}.gguf") for index in range(1, n_shard + 1)]


def _reader(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Refused("upcycling needs the package gguf, bmoe's extra [tools]: pip install 'gguf>=0.19'") from error
    try:
        reader = GGUFReader(path)
    except OSError as error:
        raise UpcycleError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise Refused(f"{path} is no GGUF file, or a damaged one: {error}") from error
    if reader.byte_order != "I":
        raise Refused(f"{path} is big-endian")
    return reader


def _check_target(request: UpcycleRequest) -> None:
    if request.target.is_dir():
        raise Refused(f"{request.target} is a folder; give a file to write")
    if request.target.exists() and not request.overwrite:
        same = request.source.exists() and request.target.samefile(request.source)
        raise Refused(
            f"{request.target} is what is read; give another name for what is written"
            if same
            else f"{request.target} is there already; --force replaces it"
        )


def _check_room(target: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < size_bytes + SPARE_BYTES:
        raise UpcycleError(
            f"{target.name} takes {size_bytes / 1e9:.2f} GB in {target.parent} and {free / 1e9:.2f} GB are free"
        )


@contextmanager
def _written_whole(request: UpcycleRequest) -> Iterator[BinaryIO]:
    """A file beside the target, this process's alone, which takes its name at the end or goes away.

    Its name is always the same: what a killed run has left, the next one takes over.
    """
    partial = _partial(request.target)
    try:
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise UpcycleError(f"cannot write to {partial.parent}: {error.strerror}") from error
    with _said(request.target), file:
        _acquire(file, partial, request.target)
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            _check_target(request)  # minutes have passed
            os.replace(partial, request.target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def clear_partial(target: Path) -> None:
    """Remove what a run that was stopped may have left beside the target, unless another is writing it."""
    partial = _partial(target)
    with suppress(OSError, Refused), partial.open("rb") as file:
        _acquire(file, partial, target)
        partial.unlink()


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def _said(target: Path) -> Iterator[None]:
    """What the system refuses while the file is written, a full disk above all, with the file's name."""
    try:
        yield
    except UpcycleError:
        raise
    except OSError as error:
        raise UpcycleError(f"cannot write {target}: {error.strerror or error}") from error


def _acquire(file: BinaryIO, partial: Path, target: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have given the file its final name since it was opened here.
        if os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise Refused(f"another bmoe is writing {target}")
