"""A prefill device under eight threads; `make sanitize-thread` looks at the same tests for races."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bmoe_native import BusyError, ClosedError, Engine, StateError, Streaming, TooLongError
from bmoe_native._lib import lib
from tests.bmoe_native.threads import N_CALLS, N_THREADS, in_threads
from tests.device.server import Server

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 300)]
STREAMED = [None, Streaming(cache_bytes=0)]


def alone(path: Path, n_tokens: int) -> np.ndarray:
    with Engine.open(path, n_ubatch=64, n_threads=1, repack=False) as engine:
        engine.prefill(TOKENS[:n_tokens])
        return engine.logits()


@pytest.fixture(scope="module")
def servers(rpc_library: None) -> Iterator[list[Server]]:
    """One for each thread: ggml's client is not made for two that compute on one device."""
    started = [Server() for _ in range(N_THREADS)]
    yield started
    for server in started:
        server.kill()


def test_engines_with_devices_are_independent(paths: dict[str, Path], servers: list[Server]) -> None:
    """Half of them stream; 200 calls each, the bits of one alone on the CPU."""
    path = paths["qwen3moe"]
    wide, narrow = alone(path, 64), alone(path, 20)

    def body(number: int) -> None:
        with Engine.open(
            path,
            n_ubatch=64,
            n_threads=1,
            repack=False,
            prefill_device=servers[number].name(),
            prefill_loaders=1 + number % 3,
            streaming=STREAMED[number % 2],
        ) as engine:
            assert engine.info.prefill_device
            for n in range(N_CALLS // 4):
                n_tokens, wanted = (20, narrow) if n % 4 == 3 else (64, wide)
                engine.drop_state()
                assert engine.prefill(TOKENS[:n_tokens]).dev_tokens == (n_tokens if n_tokens == 64 else 0)
                np.testing.assert_array_equal(engine.logits(), wanted)
                assert engine.position == n_tokens

    in_threads(body)


@pytest.mark.parametrize("streaming", STREAMED)
def test_calls_at_once_on_one_engine_are_served_or_refused(
    streaming: Streaming | None, paths: dict[str, Path], server: Server
) -> None:
    """Cancels among them, while loaders bring weights; whole afterwards."""
    path = paths["qwen3moe"]
    with Engine.open(
        path, n_ubatch=64, n_threads=1, repack=False, prefill_device=server.name(), streaming=streaming
    ) as engine:

        def body(number: int) -> None:
            draw = random.Random(number)
            calls = [
                lambda: engine.prefill(TOKENS[:64]),
                lambda: engine.prefill(TOKENS[:5]),
                lambda: engine.prefill_rows(TOKENS[:32]),
                engine.logits,
                engine.counters,
                engine.save_state,
                engine.drop_state,
                engine.sample,
                engine.cancel,
                engine.clear_cancel,
            ]
            for _ in range(N_CALLS):
                try:
                    draw.choice(calls)()
                except (BusyError, StateError, TooLongError):
                    continue

        in_threads(body)
        engine.clear_cancel()
        engine.drop_state()
        assert engine.prefill(TOKENS[:64]).dev_tokens == 64
        np.testing.assert_array_equal(engine.logits(), alone(path, 64))


@pytest.mark.parametrize("streaming", STREAMED)
def test_an_engine_is_closed_while_its_device_computes(
    streaming: Streaming | None, paths: dict[str, Path], server: Server
) -> None:
    path = paths["qwen3moe"]
    for _ in range(3):
        engine = Engine.open(path, n_ubatch=64, n_threads=1, prefill_device=server.name("slow=2"), streaming=streaming)
        computing = threading.Event()

        def body(number: int, engine: Engine = engine, computing: threading.Event = computing) -> None:
            if number > 0:
                assert computing.wait(60)
                return engine.close()
            with pytest.raises(ClosedError):
                while True:
                    computing.set()
                    if not engine.prefill(TOKENS[:128]).cancelled:
                        engine.drop_state()

        in_threads(body)
        assert lib().bmoe_position(engine._handle) == lib().BMOE_E_CLOSED
