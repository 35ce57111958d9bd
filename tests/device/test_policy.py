"""Which pieces go to a device, what is counted, and that everything else is as without one."""

from pathlib import Path

import numpy as np
import pytest

from bmoe_native import ArgumentError, Engine, Streaming, build_info, devices
from tests.device.server import Server
from tests.tiny import family

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 300)]
N_LAYER, N_EXPERT = family.N_LAYER, family.N_EXPERT


def test_devices_are_listed_with_their_memory() -> None:
    assert build_info()
    cpu = next(device for device in devices() if device.type == "cpu")
    assert cpu.name == "CPU" and cpu.description
    assert 0 < cpu.free_bytes < cpu.total_bytes  # this process is in memory, at the least


@pytest.mark.parametrize(
    ("least", "on_device"), [(0, 64 + 64 + 32), (32, 160), (33, 128), (64, 128), (65, 0), (1, 190)]
)
def test_pieces_that_are_wide_enough_run_there(
    least: int, on_device: int, paths: dict[str, Path], server: Server
) -> None:
    with Engine.open(paths["llama"], n_ubatch=64, prefill_device=server.name(), prefill_min_tokens=least) as engine:
        result = engine.prefill(TOKENS[:160])
        narrow = engine.prefill(TOKENS[160:190])
        assert result.n_tokens + narrow.n_tokens == 190
        assert result.dev_tokens + narrow.dev_tokens == on_device
        assert (result.dev_nodes > 0) == (on_device > 0)
        totals = engine.counters()
        assert totals.dev_tokens == on_device and totals.dev_nodes == result.dev_nodes + narrow.dev_nodes


def test_a_prompt_that_is_asked_again_has_been_foreseen(paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths["qwen3moe"], n_ubatch=128, prefill_device=server.name()) as engine:
        first = engine.prefill(TOKENS[:128])
        assert 0 < first.dev_demand == first.dev_routed <= N_LAYER * N_EXPERT
        engine.drop_state()
        again = engine.prefill(TOKENS[:128])
        assert again.dev_demand == 0 and again.dev_routed == first.dev_routed
        assert first.dev_read_bytes == again.dev_read_bytes == 0  # from the host's memory
        assert again.dev_nodes == first.dev_nodes > 50


@pytest.mark.parametrize("direct", [True, False])
def test_experts_are_read_once_for_each_graph_and_not_for_the_cpu(
    direct: bool, paths: dict[str, Path], server: Server
) -> None:
    streaming = Streaming(cache_bytes=0, direct=direct)
    with Engine.open(paths["qwen3moe"], n_ubatch=128, prefill_device=server.name(), streaming=streaming) as engine:
        expert_bytes = engine.info.experts_bytes // N_LAYER // N_EXPERT
        first = engine.prefill(TOKENS[:128])
        engine.drop_state()
        again = engine.prefill(TOKENS[:128])
        for result in (first, again):
            wanted = result.dev_routed * expert_bytes
            assert result.read_bytes == 0 == result.n_misses
            assert wanted <= result.dev_read_bytes <= (1.4 if direct else 1) * wanted
        tail = engine.prefill(TOKENS[128:130])
        assert tail.dev_read_bytes == 0 < tail.read_bytes


def test_what_the_cpu_keeps_in_memory_is_not_read_for_the_device(paths: dict[str, Path], server: Server) -> None:
    streaming = Streaming(cache_bytes=1 << 30)
    with Engine.open(
        paths["qwen3moe"], n_ubatch=64, prefill_device=server.name(), prefill_min_tokens=64, streaming=streaming
    ) as engine:
        for begin in range(0, 252, 63):
            engine.prefill(TOKENS[begin : begin + 63])
        engine.drop_state()
        missing = engine.info.experts_bytes - engine.counters().resident_bytes
        result = engine.prefill(TOKENS[:128])
        assert result.dev_tokens == 128
        assert result.dev_read_bytes <= 2 * 1.4 * missing < engine.info.experts_bytes  # by two graphs


def test_slow_loaders_are_seen_as_a_stall(paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths["llama"], n_ubatch=64, prefill_device=server.name("slow=20")) as engine:
        result = engine.prefill(TOKENS[:64])
        assert 0.1 < result.dev_stall_s < result.prefill_s


def test_a_device_for_wider_pieces_than_there_are_computes_none(paths: dict[str, Path], server: Server) -> None:
    said: list[str] = []
    why = "is to compute pieces of 33 tokens and more, and none is wider than 32"
    for sizes in ({"n_ubatch": 32}, {"n_ctx": 32}):
        with Engine.open(
            paths["llama"],
            prefill_device=server.name(),
            prefill_min_tokens=33,
            on_log=lambda _, text: said.append(text),
            **sizes,
        ) as engine:
            assert engine.info.prefill_device == "" and engine.info.prefill_device_bytes == 0
            assert why in engine.info.prefill_device_why and why in said.pop() and not said
            assert engine.prefill(TOKENS[:32]).dev_tokens == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Nonesuch7", "there is no device Nonesuch7 here"),
        ("CPU", "CPU is of another type than gpu and igpu"),
        ("\x1b[31m", r"there is no device \x1b[31m here"),
    ],
)
def test_a_device_that_is_not_there_leaves_everything_on_the_cpu(name: str, why: str, paths: dict[str, Path]) -> None:
    said: list[str] = []
    with (
        Engine.open(paths["llama"], prefill_device=name, on_log=lambda _, text: said.append(text)) as engine,
        Engine.open(paths["llama"]) as plain,
    ):
        assert engine.info.prefill_device == "" and why in engine.info.prefill_device_why
        assert len(said) == 1 and why in said[0] and "everything is computed on the CPU" in said[0]
        assert engine.prefill(TOKENS).dev_tokens == 0
        plain.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), plain.logits())
        assert plain.info.prefill_device == plain.info.prefill_device_why == ""
        assert engine.info.repack and plain.info.repack


def test_a_device_without_room_for_two_layers_leaves_everything_on_the_cpu(
    paths: dict[str, Path], server: Server
) -> None:
    said: list[str] = []
    with (
        Engine.open(
            paths["llama"], prefill_device=server.name("no_memory"), on_log=lambda _, text: said.append(text)
        ) as engine,
        Engine.open(paths["llama"], repack=False) as plain,
    ):
        assert len(said) == 1 and "it has no room for two layers, which take 0 MiB" in said[0]
        assert not engine.info.repack and not plain.info.repack
        assert engine.prefill(TOKENS).dev_tokens == 0
        plain.prefill(TOKENS)
        np.testing.assert_array_equal(engine.logits(), plain.logits())


def test_a_server_that_is_not_there_does_not_open(paths: dict[str, Path], rpc_library: None) -> None:
    said: list[str] = []
    device = "RPC:127.0.0.1:1"
    with Engine.open(paths["llama"], prefill_device=device, on_log=lambda _, text: said.append(text)) as engine:
        assert said == ["no prefill device, everything is computed on the CPU: the device 127.0.0.1:1 does not open"]
        assert engine.prefill(TOKENS).dev_tokens == 0


def test_a_device_that_throws_does_not_open_then_or_later(paths: dict[str, Path], rpc_library: None) -> None:
    """A backend may take what it left half made for a device."""
    said: list[str] = []
    server = Server()
    for device in (server.name("no_open"), server.name()):
        with Engine.open(paths["llama"], prefill_device=device, on_log=lambda _, text: said.append(text)) as engine:
            why = f"the device {device} does not open: Unsupported device"
            assert said.pop() == f"no prefill device, everything is computed on the CPU: {why}" and not said
            assert engine.prefill(TOKENS).dev_tokens == 0
    server.kill()


def test_the_device_holds_two_layers(paths: dict[str, Path], server: Server) -> None:
    with Engine.open(paths["qwen3moe"], prefill_device=server.name()) as engine:
        layer = engine.info.experts_bytes / N_LAYER
        assert 2 * layer < engine.info.prefill_device_bytes < 3 * layer


@pytest.mark.parametrize("option", ["prefill_min_tokens", "prefill_loaders"])
@pytest.mark.parametrize("value", [-1, 65537, 2**40, "x"])
def test_options_out_of_range_are_refused(option: str, value: object, paths: dict[str, Path]) -> None:
    with pytest.raises(ArgumentError, match=option):
        Engine.open(paths["llama"], **{option: value})  # type: ignore[arg-type]
