"""Wide pieces on a device with the CPU's kernels compute the bits of the CPU (gate g), and the waits are why."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe_native import Engine, EngineError, Streaming
from tests import tiny
from tests.device.server import Server
from tests.tiny.family import N_EMBD, ones

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 300)]
# Wide and narrow pieces in turn, the same widths on different positions, a prompt again.
PROMPTS = ((0, 1), (0, 70), (70, 200), (0, 300), (5, 300), (0, 64), (64, 128), (0, 31), (31, 95))
STREAMED = [name for name, family in tiny.FAMILIES.items() if family.metadata.get("expert_count")]


def bits(path: Path, device: str = "", n_ubatch: int = 64, **options: Any) -> Iterator[Any]:
    with Engine.open(path, n_ubatch=n_ubatch, n_threads=1, repack=False, prefill_device=device, **options) as engine:
        assert engine.info.prefill_device == device, engine.info.prefill_device_why
        for begin, end in PROMPTS:
            if begin == 0:
                engine.drop_state()
            engine.prefill(TOKENS[begin:end])
            yield engine.logits()
        assert bool(engine.counters().dev_tokens) == bool(device)


def assert_same(path: Path, device: str, n_ubatch: int = 64, **options: Any) -> None:
    on_cpu = bits(path, n_ubatch=n_ubatch)
    for got, wanted in zip(bits(path, device, n_ubatch, **options), on_cpu, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("n_ubatch", [32, 512])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_device_computes_the_bits_of_the_cpu(
    family: str, n_ubatch: int, paths: dict[str, Path], server: Server
) -> None:
    assert_same(paths[family], server.name(), n_ubatch)


@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("family", STREAMED)
def test_streamed_experts_go_to_the_device(family: str, cached: int, paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths[family], inspect=True) as engine:
        budget = engine.info.experts_bytes * cached // 4
    for direct, dense, loaders in ((True, "mmap", 1), (False, "anon", 5)):
        streaming = Streaming(cache_bytes=budget, direct=direct, dense=dense)
        assert_same(paths[family], server.name(), streaming=streaming, prefill_loaders=loaders)


def test_experts_of_a_layer_that_is_left_out_are_not_missed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp does not load the layer that is there to predict a second token."""
    family = tiny.FAMILIES["deepseek2"]

    def layer(number: int, draw: Any) -> Iterator[Any]:
        yield from family.layer(number, draw)
        if number == family.n_layer:
            yield "nextn.eh_proj.weight", draw(N_EMBD, 2 * N_EMBD)
            yield "nextn.enorm.weight", ones(N_EMBD)
            yield "nextn.hnorm.weight", ones(N_EMBD)

    metadata = {**family.metadata, "nextn_predict_layers": 1}
    longer = replace(family, layer=layer, n_layer=family.n_layer + 1, metadata=metadata)
    monkeypatch.setitem(tiny.FAMILIES, "deepseek2", longer)
    path = tiny.write(tmp_path / "m.gguf", arch="deepseek2", n_ctx_train=1024)
    assert_same(path, server.name(), streaming=Streaming(cache_bytes=0))


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "granitehybrid"])
def test_slow_loaders_change_nothing(family: str, paths: dict[str, Path], server: Server) -> None:
    assert_same(paths[family], server.name("slow=4"))
    if family in STREAMED:
        assert_same(paths[family], server.name("slow=4"), streaming=Streaming(cache_bytes=0))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_state_lies_where_the_device_copies_from(family: str, paths: dict[str, Path], server: Server) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"log_level": 2, "on_log": lambda _level, text: said.append(text)}
    assert_same(paths[family], server.name("state_memory"), **options)
    kept = [line for line in said if "KV buffer size" in line or "RS buffer size" in line]
    assert kept and all("bmoe_state" in line for line in kept), kept


@pytest.mark.parametrize("fault", ["no_fill_wait&slow=4", "early_refill"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_without_a_wait_the_bits_are_others(family: str, fault: str, paths: dict[str, Path], server: Server) -> None:
    with pytest.raises((AssertionError, EngineError)):
        assert_same(paths[family], server.name(fault))


def test_a_missed_pacing_point_fails_the_decode(paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths["llama"], prefill_device=server.name("skipped_point")) as engine:
        with pytest.raises(EngineError, match="the end of layer 0 had not been seen"):
            engine.prefill(TOKENS)
        with pytest.raises(EngineError, match="can only be closed"):
            engine.prefill(TOKENS[:3])
    assert_same(paths["llama"], server.name())  # the next engine has the device whole


def test_a_state_moves_between_the_device_and_the_cpu(paths: dict[str, Path], server: Server) -> None:
    for family in ("llama", "gemma3", "granitehybrid"):
        with (
            Engine.open(paths[family], n_ubatch=64, repack=False, prefill_device=server.name()) as there,
            Engine.open(paths[family], n_ubatch=64, repack=False) as here,
        ):
            for engine in (there, here):
                engine.prefill(TOKENS[:128])
            states = [bytes(engine.save_state()) for engine in (there, here)]
            assert states[0] == states[1]
            there.load_state(states[1])
            for engine in (there, here):
                engine.prefill(TOKENS[128:200])
            np.testing.assert_array_equal(there.logits(), here.logits())


def test_hooks_see_on_the_device_what_they_see_on_the_cpu(paths: dict[str, Path], server: Server) -> None:
    seen: list[list[Any]] = []
    for device in ("", server.name()):
        heard: list[Any] = []

        def on_routing(routing: Any, heard: list[Any] = heard) -> None:
            heard.append((routing.layer, routing.experts.tolist(), routing.weights.tolist()))

        def on_layer(layer: int, state: Any, heard: list[Any] = heard) -> None:
            heard.append((layer, state.tolist()))

        with Engine.open(
            paths["qwen3moe"],
            n_ubatch=64,
            repack=False,
            prefill_device=device,
            on_routing=on_routing,
            on_layer=on_layer,
        ) as engine:
            engine.prefill(TOKENS[:128])
            head = engine.head()
            rows = engine.head_logits(np.float32([state for *_, state in heard[-1:]]), TOKENS[:5])
        seen.append([*heard, head.norm, head.epsilon, head.norm_weight.tolist(), rows.tolist()])
    assert seen[0] == seen[1] and len(seen[0]) > 6
