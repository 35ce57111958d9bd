"""A type that the device refuses is carried there in another, and the model's own is back when the call returns."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bmoe_native import Engine, Streaming
from tests import tiny
from tests.device.server import Server

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 200)]


def with_matrices_in(path: Path, to: Path, kind: gguf.GGMLQuantizationType, but: str | None = None) -> Path:
    """The model with the matrices of its layers in another type; the others, and those named `but`, as F32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        is_kept = but is not None and but in tensor.name
        if tensor.name.startswith("blk.") and not is_kept and rows.ndim > 1 and rows.shape[-1] % 32 == 0:
            writer.add_tensor(tensor.name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def logits(path: Path, n_tokens: int, device: str = "", streamed: bool = False) -> Any:
    streaming = Streaming(cache_bytes=0) if streamed else None
    with Engine.open(
        path, n_ubatch=64, n_threads=1, repack=False, prefill_device=device, streaming=streaming
    ) as engine:
        assert engine.info.prefill_device == device, engine.info.prefill_device_why
        engine.prefill(TOKENS[:64])
        for at in range(64, n_tokens, 64):
            engine.prefill(TOKENS[at : min(at + 64, n_tokens)])
        return engine.logits()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model twice: its values as F16, and the same values as F32."""
    folder = tmp_path_factory.mktemp("types")

    def halved(_name: str, array: Any) -> Any:
        return np.asarray(array).astype(np.float16).astype(np.float32)

    whole = tiny.write(folder / "f32.gguf", arch="qwen3moe", change=halved)
    return with_matrices_in(whole, folder / "f16.gguf", gguf.GGMLQuantizationType.F16), whole


@pytest.mark.parametrize("streamed", [False, True])
def test_f16_goes_to_the_device_as_the_same_values_in_f32(
    streamed: bool, halves: tuple[Path, Path], server: Server
) -> None:
    half, whole = halves
    refused = logits(half, 128, server.name("refuse=f16"), streamed)
    np.testing.assert_array_equal(refused, logits(whole, 128))
    assert (refused != logits(half, 128)).any()  # on the CPU, F16 rounds what it is multiplied with


def test_the_weights_have_their_own_type_again_on_the_host(halves: tuple[Path, Path], server: Server) -> None:
    half, _ = halves
    with (
        Engine.open(half, n_ubatch=64, n_threads=1, repack=False, prefill_device=server.name("refuse=f16")) as engine,
        Engine.open(half, n_ubatch=64, n_threads=1, repack=False) as plain,
    ):
        engine.prefill(TOKENS[:64])
        assert engine.counters().dev_tokens == 64
        for one in (engine, plain):
            one.drop_state()
            one.prefill(TOKENS[:20])
        np.testing.assert_array_equal(engine.logits(), plain.logits())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "MXFP4"])
def test_a_quantized_type_goes_as_the_nearest_that_is_taken(
    kind: str, streamed: bool, tmp_path: Path, server: Server
) -> None:
    path = with_matrices_in(
        tiny.write(tmp_path / "f32.gguf", arch="qwen3moe"), tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]
    )
    wanted = logits(path, 128)
    same = logits(path, 128, server.name(), streamed)
    np.testing.assert_array_equal(same, wanted)
    carried = logits(path, 128, server.name(f"refuse={kind.lower()}"), streamed)
    assert (carried != wanted).any()
    assert np.corrcoef(carried, wanted)[0, 1] > 0.99


def test_a_type_that_nothing_carries_stays_on_the_cpu(paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths["llama"], prefill_device=server.name("refuse=f32")) as engine:
        assert engine.info.prefill_device == ""
        assert "it computes with none of this model's weights" in engine.info.prefill_device_why
        assert engine.prefill(TOKENS).dev_tokens == 0
