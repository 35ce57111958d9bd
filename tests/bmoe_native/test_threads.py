"""What may run at once, on one engine and on several. `make sanitize-thread` looks at the same tests for races."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe_native import BusyError, ClosedError, Engine, Streaming
from bmoe_native._lib import ffi, lib
from tests.bmoe_native.test_c_errors import calls
from tests.bmoe_native.threads import N_CALLS, N_THREADS, in_threads

TOKENS = [1 + n % 200 for n in range(50)]
WHILE_BUSY = {"cancel", "cancel_clear"}


@pytest.fixture
def handle(tiny_path: Path) -> Iterator[Any]:
    out = ffi().new("bmoe_engine **")
    params = ffi().new("bmoe_open_params *")
    lib().bmoe_open_params_init(params)
    params.n_ctx, params.n_threads = 256, 1
    assert lib().bmoe_open(out, bytes(tiny_path), params, ffi().NULL, 0) == 0
    yield out[0]
    lib().bmoe_close(out[0])


def test_what_any_thread_may_call_at_any_time(handle: Any) -> None:
    """While another thread prefills: none is refused, and each thread's error text is its own."""
    c, f = lib(), ffi()
    ended = threading.Event()
    all_failed = threading.Barrier(N_THREADS)
    n_devices = c.bmoe_device_count()

    def prefill() -> None:
        tokens = f.new("int32_t[]", [1] * 64)
        while not ended.is_set():
            assert c.bmoe_prefill(handle, tokens, 64, f.NULL) in (c.BMOE_OK, c.BMOE_E_CANCELLED, c.BMOE_E_BUSY)
            c.bmoe_state_drop(handle)

    def body(number: int) -> None:
        params, sampling = f.new("bmoe_open_params *"), f.new("bmoe_sampling *")
        device, out = f.new("bmoe_device *"), f.new("bmoe_engine **")
        device.size_bytes = f.sizeof("bmoe_device")
        never_opened = f.cast("bmoe_engine *", 0x9990 + 16 * number)
        nowhere, error = f"/nowhere/{number}.gguf".encode(), f.new("char[]", 200)
        for _ in range(N_CALLS):
            assert c.bmoe_abi_version() == c.BMOE_ABI_VERSION
            assert f.string(c.bmoe_build_info()).startswith(b"bmoe ")
            c.bmoe_open_params_init(params)
            c.bmoe_sampling_init(sampling)
            assert params.size_bytes == f.sizeof("bmoe_open_params") and sampling.top_p == 1.0
            assert c.bmoe_cancel(handle) == c.bmoe_cancel_clear(handle) == c.BMOE_OK
            assert c.bmoe_position(never_opened) == c.BMOE_E_CLOSED
            all_failed.wait(60)
            assert b"not open" in f.string(c.bmoe_last_error(never_opened))
            c.bmoe_close(never_opened)
            assert c.bmoe_device_count() == n_devices
            assert [c.bmoe_get_device(n, device) for n in range(n_devices)] == [c.BMOE_OK] * n_devices
            assert c.bmoe_get_device(n_devices + number, device) == c.BMOE_E_ARGUMENT
            assert f"device {n_devices + number} is".encode() in f.string(c.bmoe_last_error(f.NULL))
            assert c.bmoe_open(out, nowhere, f.NULL, error, 200) == c.BMOE_E_MODEL
            assert nowhere in f.string(error)

    worker = threading.Thread(target=prefill)
    worker.start()
    try:
        in_threads(body)
    finally:
        ended.set()
        worker.join()


def test_any_call_from_any_thread_is_served_or_refused(handle: Any) -> None:
    """All calls of one engine at once, 1,600 in all: a documented status each time, and the engine is whole after."""
    c = lib()
    allowed = {c.BMOE_E_BUSY, c.BMOE_E_CANCELLED, c.BMOE_E_STATE, c.BMOE_E_TOO_SMALL, c.BMOE_E_UNSUPPORTED}

    def body(number: int) -> None:
        mine, draw = calls(), random.Random(number)
        for _ in range(N_CALLS):
            name = draw.choice(list(mine))
            status = mine[name](handle)
            assert status >= 0 or status in (allowed | {c.BMOE_E_TOO_LONG}), (name, status)

    in_threads(body)
    assert c.bmoe_cancel_clear(handle) == c.bmoe_state_drop(handle) == c.BMOE_OK
    mine = calls()
    assert mine["prefill"](handle) == mine["logits"](handle) == c.BMOE_OK


def test_while_a_call_runs_every_other_is_refused_and_changes_nothing(tiny_path: Path) -> None:
    """Each call 200 times from eight threads, all of them while a prefill stands still in a hook."""
    with Engine.open(tiny_path, n_ctx=256, n_threads=1) as engine:
        engine.prefill(TOKENS)
        alone = engine.logits()
    running, refused = threading.Event(), threading.Event()

    def stand_still(_layer: int, _state: Any) -> None:
        running.set()
        assert refused.wait(600)

    c, f = lib(), ffi()
    with Engine.open(tiny_path, n_ctx=256, n_threads=1, on_layer=stand_still) as engine:
        handle = engine._handle
        worker = threading.Thread(target=engine.prefill, args=(TOKENS,))
        worker.start()
        assert running.wait(60)

        def body(_number: int) -> None:
            mine = {name: call for name, call in calls().items() if name not in WHILE_BUSY}
            for _ in range(N_CALLS):
                for name, call in mine.items():
                    assert call(handle) == c.BMOE_E_BUSY, name
                    assert b"another call is running" in f.string(c.bmoe_last_error(handle))

        try:
            in_threads(body)
        finally:
            refused.set()
            worker.join()
        assert engine.position == len(TOKENS)
        np.testing.assert_array_equal(engine.logits(), alone)


@pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=0)])
def test_calls_at_once_on_one_engine_are_right_or_refused(moe_path: Path, streaming: Streaming | None) -> None:
    with Engine.open(
        moe_path, n_ctx=256, n_threads=1, streaming=streaming, on_layer=lambda _layer, _state: None
    ) as engine:
        engine.prefill(TOKENS)
        states = np.zeros((2, engine.info.n_embd), np.float32)
        questions: dict[str, Callable[[], Any]] = {
            "position": lambda: engine.position,
            "logits": lambda: engine.logits().tobytes(),
            "sample": engine.sample,
            "sampling": lambda: engine.start_sampling(),
            "tokenize": lambda: engine.tokenize("some words, and " * 20),
            "a run that has a thread": lambda: engine.tokenize("x" * 5000),
            "detokenize": lambda: engine.detokenize(TOKENS),
            "token_attr": lambda: engine.token_attr(7),
            "render": lambda: engine.render([("user", "a question")]).text,
            "state_size": engine.state_size,
            "save_state": lambda: bytes(engine.save_state()),
            "clear_cancel": engine.clear_cancel,
            "head": lambda: engine.head().norm_weight.tobytes(),
            "head_rows": lambda: engine.head_rows(TOKENS[:5])[0].tobytes(),
            "head_logits": lambda: engine.head_logits(states, TOKENS[:5]).tobytes(),
            "counters": lambda: engine.counters().n_prefill_tokens,
        }
        alone = {name: ask() for name, ask in questions.items()}

        def body(number: int) -> None:
            draw = random.Random(number)
            for _ in range(N_CALLS):
                name = draw.choice(list(questions))
                try:
                    answer = questions[name]()
                except BusyError:
                    continue
                assert answer == alone[name], name

        in_threads(body)
        assert {name: ask() for name, ask in questions.items()} == alone


def test_an_engine_is_closed_by_all_threads_while_all_call(tiny_path: Path) -> None:
    """Eight threads of 200 calls, of which a tenth closes: after the first of those every call is refused."""
    c = lib()
    for _ in range(10):
        engine = Engine.open(tiny_path, n_ctx=64, n_threads=1)
        handle = engine._handle

        def body(number: int, handle: Any = handle) -> None:
            mine, closed = calls(), False
            allowed = {c.BMOE_E_BUSY, c.BMOE_E_CANCELLED, c.BMOE_E_STATE, c.BMOE_E_TOO_SMALL, c.BMOE_E_UNSUPPORTED}
            for n in range(N_CALLS // 10):
                status = mine["prefill" if (n + number) % 2 else "state_drop"](handle)
                assert status == c.BMOE_E_CLOSED or (not closed and (status == c.BMOE_OK or status in allowed))
                if n == 10:
                    c.bmoe_close(handle)
                    closed = True

        in_threads(body)
        engine.close()
        with pytest.raises(ClosedError):
            engine.logits()


def test_all_threads_open_and_close(tiny_path: Path, moe_path: Path) -> None:
    """Two hundred engines, to inspect: each is the one that was asked for, under a name of its own."""
    with Engine.open(tiny_path, inspect=True) as tiny_one, Engine.open(moe_path, inspect=True) as moe_one:
        infos = {tiny_path: tiny_one.info, moe_path: moe_one.info}
    names: set[int] = set()

    def body(number: int) -> None:
        path = (tiny_path, moe_path)[number % 2]
        for _ in range(N_CALLS // N_THREADS):
            with Engine.open(path, inspect=True) as engine:
                assert engine.info == infos[path]
                names.add(int(ffi().cast("uintptr_t", engine._handle)))

    in_threads(body)
    assert len(names) == N_CALLS


@pytest.mark.parametrize("streaming", [None, Streaming(cache_bytes=0), Streaming(cache_bytes=100_000, dense="anon")])
def test_engines_of_one_file_are_independent(moe_path: Path, streaming: Streaming | None) -> None:
    """Opened, used and closed by eight threads at once, each with tokens of its own: the bits of one alone."""

    def computed(engine: Engine, number: int) -> tuple[bytes, bytes]:
        engine.drop_state()
        engine.prefill([number + 1, *TOKENS[1:]])
        return engine.logits().tobytes(), engine.save_state()

    with Engine.open(moe_path, n_ctx=64, n_threads=1, streaming=streaming) as alone:
        expected = [computed(alone, number) for number in range(N_THREADS)]
        prompt = alone.render([("user", "hi")])
    assert len({logits for logits, _state in expected}) == N_THREADS

    def body(number: int) -> None:
        for _ in range(5):
            with Engine.open(moe_path, n_ctx=64, n_threads=1, streaming=streaming) as engine:
                for _ in range(N_CALLS // 5 // 5):
                    assert computed(engine, number) == expected[number]
                    assert engine.render([("user", "hi")]) == prompt

    in_threads(body)
