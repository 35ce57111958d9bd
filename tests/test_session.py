import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe import DecideRequest, DecideResult, GenerateRequest, Refused, Session
from bmoe.decide.backend import ChatMessage, Float32Array
from bmoe.decide.prefix import MIB
from bmoe_native import Engine
from bmoe_native.errors import ClosedError, EngineError, TemplateError, TooLongError
from bmoe_native.types import Info, Streaming
from tests import tiny
from tests.decide.scripted import SYSTEM
from tests.fakes import INFO, ScriptedEngine

ASK = DecideRequest(prefix="one two three", suffix=" four", choices=("A", "B"))
WAIT_S = 120  # only a hang is to end by it


def bits(result: DecideResult) -> tuple[float, ...]:
    return result.choice_logp


def test_importing_bmoe_loads_no_library() -> None:
    code = "import bmoe.session, sys; print([*sys.modules], open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "bmoe.session" in maps
    assert "libbmoe" not in maps
    assert "_bmoe_cffi" not in maps


def test_importing_bmoe_imports_nothing_and_its_names_are_there() -> None:
    code = "import bmoe, sys; print(*(name for name in sys.modules if name.startswith(('bmoe', 'numpy'))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["bmoe"]
    assert all(getattr(bmoe, name).__name__ == name for name in bmoe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        bmoe.Nothing  # noqa: B018


def test_a_request_whole_or_by_its_fields_is_the_same() -> None:
    whole = Session(ScriptedEngine()).decide(ASK)
    fields = Session(ScriptedEngine()).decide(prefix=ASK.prefix, suffix=ASK.suffix, choices=["A", "B"])
    assert bits(whole) == bits(fields)
    with pytest.raises(TypeError, match="not both"):
        Session(ScriptedEngine()).decide(ASK, prefix="x")


def test_one_text_as_choices_is_refused() -> None:
    with pytest.raises(Refused, match="choices must be a list of texts"):
        Session(ScriptedEngine()).decide(prefix="p", choices="AB")


def test_it_closes_its_engine() -> None:
    engine = ScriptedEngine()
    session = Session(engine)
    with session:
        session.decide(ASK)
        open_within = not engine.closed
    assert (open_within, engine.closed) == (True, True)
    session.close()
    with pytest.raises(ClosedError):
        session.decide(ASK)


@pytest.mark.parametrize(("mode", "reuses"), [("auto", True), ("on", True), ("off", False)])
def test_prefix_cache_modes(mode: str, reuses: bool) -> None:
    session = Session(ScriptedEngine(), prefix_cache=mode)
    session.decide(ASK)
    assert (session.decide(ASK).n_reused > 0) is reuses


ON_DEVICE = dataclasses.replace(INFO, prefill_device="Vulkan0")
NOT_THERE = dataclasses.replace(INFO, prefill_device_why="there is no device Vulkan0 here")


@pytest.mark.parametrize(("info", "reuses"), [(ON_DEVICE, False), (NOT_THERE, True)])
def test_with_a_prefill_device_auto_keeps_no_prefix(info: Info, reuses: bool) -> None:
    session = Session(ScriptedEngine(info=info))
    session.decide(ASK)
    again = session.decide(ASK)
    assert (again.n_reused > 0, again.prefix_state_mib > 0) == (reuses, reuses)


def test_with_a_prefill_device_a_prefix_cache_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="prefix_cache on cannot be had with the prefill device Vulkan0: each piece of"):
        Session(ScriptedEngine(info=ON_DEVICE), prefix_cache="on")
    session = Session(ScriptedEngine(info=NOT_THERE), prefix_cache="on")
    session.decide(ASK)
    assert session.decide(ASK).n_reused > 0


def test_what_is_refused_leaves_no_engine_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = ScriptedEngine(info=ON_DEVICE)
    monkeypatch.setattr(Engine, "open", lambda path, **options: engine)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(Refused, match="cannot be had"):
        Session.open(tmp_path / "m.gguf", prefix_cache="on", prefill_device="Vulkan0")
    assert engine.closed


@pytest.mark.parametrize("name", ["RPC:127.0.0.1:50052", "rpc:localhost:1", " RPC:1.2.3.4:5", "RPC0"])
def test_no_endpoint_is_a_prefill_device(name: str) -> None:
    with pytest.raises(Refused, match="is an endpoint of ggml's RPC, and none is opened"):
        Session.open("/nowhere/model.gguf", prefill_device=name)


@pytest.mark.parametrize("name", [None, 0, b"Vulkan0", "Vulkan\udcff"])
def test_a_prefill_device_has_a_name(name: Any) -> None:
    with pytest.raises(Refused, match=r"^prefill_device (must be text|holds U\+DCFF)"):
        Session.open("/nowhere/model.gguf", prefill_device=name)


def test_generated_tokens_never_go_to_a_device() -> None:
    with pytest.raises(Refused, match="prefill_min_tokens is 1, with which each generated token"):
        Session.open("/nowhere/model.gguf", prefill_device="Vulkan0", prefill_min_tokens=1)


def test_another_prefix_cache_mode_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(Refused, match="prefix_cache must be one of auto, on, off, not 'maybe'"):
        Session.open("/nowhere/model.gguf", prefix_cache="maybe")


def test_without_decisions_they_are_refused_and_nothing_is_kept() -> None:
    session = Session(ScriptedEngine(), decide=False)
    for _ in range(2):
        with pytest.raises(Refused, match="opened without decisions"):
            session.decide(ASK)


def test_the_sessions_system_message_is_a_default() -> None:
    engine = ScriptedEngine()
    session = Session(engine, system="be brief", prefix_cache="off")
    session.decide(ASK)
    assert list(engine.pieces[0]) == engine.chat_tokens([("system", "be brief"), ("user", ASK.prefix + ASK.suffix)])
    session.decide(prefix="p", choices=("A", "B"), system="mine")
    assert list(engine.pieces[0]) == engine.chat_tokens([("system", "mine"), ("user", "p")])
    session.decide(prefix="p", choices=("A", "B"), template=False)
    assert SYSTEM not in engine.pieces[0]


class TestErrors:
    def test_a_template_that_refuses_is_a_refusal_with_its_cause(self) -> None:
        session = Session(ScriptedEngine(has_template=False))
        with pytest.raises(Refused, match="the model has no chat template") as refusal:
            session.decide(ASK)
        assert isinstance(refusal.value.__cause__, TemplateError)
        assert session.decide(prefix="p", choices=("A", "B"), template=False).best >= 0

    def test_too_long_is_a_refusal(self) -> None:
        engine = ScriptedEngine()

        def too_long() -> None:
            raise TooLongError("5000 tokens, 4096 fit")

        engine.during_prefill = too_long
        with pytest.raises(Refused, match="5000 tokens"):
            Session(engine).decide(ASK)

    def test_a_text_too_long_to_tokenize_is_a_refusal(self) -> None:
        engine = ScriptedEngine()

        def too_long(*_: object, **__: object) -> list[int]:
            raise TooLongError("a run of 2000000 bytes without a blank")

        engine.text_tokens = too_long  # type: ignore[method-assign]
        engine.chat_tokens = too_long  # type: ignore[method-assign]
        session = Session(engine)
        for _ in range(2):
            with pytest.raises(Refused, match="2000000 bytes"):
                session.decide(ASK)

    def test_an_engine_failure_ends_the_session(self) -> None:
        engine = ScriptedEngine()

        def fail() -> None:
            raise EngineError("llama.cpp failed")

        engine.during_prefill = fail
        session = Session(engine)
        with pytest.raises(EngineError, match=r"llama\.cpp failed"):
            session.decide(ASK)
        engine.during_prefill = lambda: None
        with pytest.raises(ClosedError, match=r"ended with an earlier error: llama\.cpp failed"):
            session.decide(ASK)

    def test_an_interrupt_does_not(self) -> None:
        engine = ScriptedEngine()

        def interrupt() -> None:
            raise KeyboardInterrupt

        engine.during_prefill = interrupt
        session = Session(engine)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                session.decide(ASK)
        engine.during_prefill = lambda: None
        assert bits(session.decide(ASK)) == bits(Session(ScriptedEngine()).decide(ASK))


@pytest.mark.parametrize(
    "call",
    [
        "session.decide(prefix='p', choices=('A', 'B'))",
        "session.lettered('Which?', ['a', 'b'])",
        "session.cancel()",
    ],
)
def test_a_forked_child_is_told_so_also_while_the_parent_decides(call: str) -> None:
    code = f"""
        import os, signal, threading
        from bmoe import Session
        from bmoe_native.errors import ForkedError
        from tests.fakes import ScriptedEngine

        engine = ScriptedEngine()
        engine.go.clear()
        session = Session(engine)
        ask = dict(prefix="one", choices=("A", "B"))
        running = threading.Thread(target=session.decide, kwargs=ask)
        running.start()
        engine.computing.wait({WAIT_S})
        session._cancelling.acquire()  # as a thread in the middle of a cancel holds it
        if (child := os.fork()) == 0:
            signal.alarm({WAIT_S // 3})
            try:
                {call}
            except ForkedError as error:
                os._exit(7 if "before a fork" in str(error) else 8)
            os._exit(9)
        status = os.waitpid(child, 0)[1]
        session._cancelling.release()
        engine.go.set()
        running.join()
        session.decide(**ask)
        print(os.waitstatus_to_exitcode(status))
    """
    child = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=True,
    )
    assert child.stdout == "7\n", f"{-signal.SIGALRM} is a child that hung"


class TestThreads:
    def test_a_cancel_stops_the_request_that_runs(self) -> None:
        engine = ScriptedEngine()
        engine.go.clear()
        session = Session(engine)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(session.decide, ASK)
            assert engine.computing.wait(WAIT_S)
            session.cancel()
            assert running.result(WAIT_S).cancelled
        engine.go.set()
        assert bits(session.decide(ASK)) == bits(Session(ScriptedEngine()).decide(ASK))

    def test_a_cancel_between_two_requests_is_nobodys(self) -> None:
        engine = ScriptedEngine()
        session = Session(engine)
        session.cancel()
        assert not engine.cancelled.is_set()
        assert not session.decide(ASK).cancelled
        session.cancel()
        assert not session.decide(ASK).cancelled

    def test_a_cancel_that_came_too_late_is_not_the_next_requests(self) -> None:
        engine = ScriptedEngine()
        read = engine.logits

        def cancel_after_the_prefill() -> Float32Array:
            session.cancel()
            return read()

        engine.logits = cancel_after_the_prefill  # type: ignore[method-assign]
        session = Session(engine)
        for _ in range(2):
            assert not session.decide(ASK).cancelled
            assert engine.cancelled.is_set()

    def test_a_cancel_while_tokenizing_is_not_lost(self) -> None:
        engine = ScriptedEngine()
        session = Session(engine)
        tokenize = engine.chat_tokens

        def cancel_meanwhile(messages: Sequence[ChatMessage]) -> list[int]:
            session.cancel()
            return tokenize(messages)

        engine.chat_tokens = cancel_meanwhile  # type: ignore[method-assign]
        assert session.decide(ASK).cancelled

    def test_eight_threads_are_served_one_at_a_time(self) -> None:
        session = Session(ScriptedEngine(), prefix_cache="off")
        texts = [f"thread {number}" for number in range(8)]
        alone = {
            text: bits(Session(ScriptedEngine(), prefix_cache="off").decide(prefix=text, choices=("A", "B")))
            for text in texts
        }
        start = threading.Barrier(8)

        def many(text: str) -> set[tuple[float, ...]]:
            start.wait(WAIT_S)
            return {bits(session.decide(prefix=text, choices=("A", "B"))) for _ in range(50)}

        with ThreadPoolExecutor(8) as pool:
            for text, answers in zip(texts, pool.map(many, texts), strict=True):
                assert answers == {alone[text]}


class TestCacheBudget:
    INFO = dataclasses.replace(INFO, is_streamed=True, streamed_bytes=64 * MIB, cache_bytes=16 * MIB)

    def test_it_arrives_and_is_told(self) -> None:
        engine = ScriptedEngine(info=self.INFO)
        engine.resident_bytes = 2 * MIB
        with Session(engine) as session:
            before = session.generate(GenerateRequest(prompt="p", n_predict=1))
            session.set_cache_budget(4 * MIB)
            after = session.generate(GenerateRequest(prompt="p", n_predict=1))
        assert (before.cache_budget_mib, before.cache_resident_mib) == (16.0, 2.0)
        assert (after.cache_budget_mib, engine.cache_bytes) == (4.0, 4 * MIB)

    @pytest.mark.parametrize("n_bytes", [-1, 2**63, True, 1.5, "100", None])
    def test_what_is_no_budget_is_refused(self, n_bytes: Any) -> None:
        with Session(ScriptedEngine(info=self.INFO)) as session:
            with pytest.raises(Refused, match="n_bytes"):
                session.set_cache_budget(n_bytes)
            session.decide(ASK)

    def test_where_nothing_streams_it_is_refused_and_the_session_goes_on(self) -> None:
        with Session(ScriptedEngine()) as session:
            with pytest.raises(Refused, match="nothing streams"):
                session.set_cache_budget(0)
            assert session.generate(GenerateRequest(prompt="p", n_predict=1)).cache_budget_mib == 0.0

    def test_a_real_one_is_given_back_at_once(self, tmp_path: Path) -> None:
        path = tiny.write(tmp_path / "moe.gguf", arch="qwen3moe")
        ask = {"prefix": "A prefix. ", "suffix": "And what of it?", "choices": ("A", "b"), "reuse_prefix": False}
        with Session.open(path, streaming=Streaming(cache_bytes=64 * MIB)) as session:
            answers = [session.decide(**ask)]
            assert session._engine.counters().resident_bytes > 0
            session.set_cache_budget(0)
            assert session._engine.counters().resident_bytes == 0
            answers.append(session.decide(**ask))
            session.set_cache_budget(64 * MIB)
            answers += [session.decide(**ask), session.decide(**ask)]
        assert len(set(map(bits, answers))) == 1
        assert answers[1].cache_hit_pct == 0.0
        assert answers[3].cache_hit_pct == 100.0
        assert answers[3].prefill_read_mib == 0.0
