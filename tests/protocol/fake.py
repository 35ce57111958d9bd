"""A session without a model, the streams around it, and the table of the contract."""

import io
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bmoe.decide import DecideRequest, DecideResult, Refused
from bmoe.generate import GenerateRequest, GenerateResult, Step
from bmoe.serve import End, Outlet, Server, Watcher

WAIT_S = 120  # only a hang is to end by it
DOC = Path(__file__).parents[2] / "docs" / "telemetry.md"
FINAL = ("DECIDE", "DONE", "ERROR")


class FakeSession:
    """Answers at once, or when `go` is set; cancels act as those of a Session do."""

    def __init__(self) -> None:
        self.prefix_state_mib = 1.5
        self.asked: list[DecideRequest | GenerateRequest] = []
        self.running = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.starts_after_s = 0.0
        self.fail: Callable[[Any], None] = lambda request: None
        self.logp = -0.25
        self._cancelled = threading.Event()

    def decide(self, request: DecideRequest) -> DecideResult:
        cancelled = self._serve(request)
        n_tokens = len(request.prefix.split() + request.suffix.split())
        return DecideResult(
            cancelled=cancelled,
            choices=request.choices,
            best=-1 if cancelled else 0,
            choice_logp=() if cancelled else (self.logp, *[float("-inf")] * (len(request.choices) - 1)),
            outside_mass=0.0 if cancelled else 0.125,
            outside_text="" if cancelled else "é",
            outside_text_mass=0.0 if cancelled else 0.0625,
            n_tokens=n_tokens,
            n_reused=0,
            n_prefilled=n_tokens,
            policy_s=0.001,
            restore_s=0.0,
            store_s=0.0,
            prefill_s=0.5,
            prefill_cpu_s=1.0,
            prefix_state_mib=self.prefix_state_mib,
        )

    def generate(self, request: GenerateRequest, on_step: Callable[[Step], None] | None = None) -> GenerateResult:
        cancelled = self._serve(request)
        words: list[str] = []
        for number in range(1, min(request.n_predict, 5) + 1):
            cancelled = cancelled or self._cancelled.is_set()
            if cancelled:
                break
            words.append(f"wörd{number} ")
            if on_step is not None:
                on_step(a_step(step=number, steps=request.n_predict, delta_text=words[-1]))
        return GenerateResult(
            ending="cancelled" if cancelled else "length",
            text="".join(words),
            reasoning="",
            n_generated=len(words),
            n_prompt=7,
            n_reused=2,
            n_past=9 + len(words),
            prefill_s=0.5,
            prefill_cpu_s=1.0,
            generate_s=0.25 * len(words),
            generate_cpu_s=0.5 * len(words),
            n_major_faults=0,
        )

    def cancel(self) -> None:
        if self.running.is_set():
            self._cancelled.set()

    def _serve(self, request: DecideRequest | GenerateRequest) -> bool:
        self._cancelled.clear()
        time.sleep(self.starts_after_s)
        self.asked.append(request)
        self.running.set()
        try:
            self.fail(request)
            if isinstance(request, DecideRequest) and len(set(request.choices)) < len(request.choices):
                raise Refused("two choices begin alike")
            while not self.go.is_set() and not self._cancelled.is_set():
                time.sleep(0.001)
            return self._cancelled.is_set()
        finally:
            self.running.clear()


def a_step(**values: Any) -> Step:
    plain = {"step": 1, "steps": 2, "wall_s": 0.25, "cpu_s": 0.5, "n_major_faults": 0}
    return Step(**{**plain, "delta_text": "", "delta_reasoning": "", **values})


class Pipe:
    """A source that is fed while it is read."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended = False
        self._fed = threading.Condition()

    def feed(self, *lines: bytes | str | dict[str, Any]) -> None:
        with self._fed:
            for line in lines:
                self._data += encoded(line) + b"\n"
            self._fed.notify()

    def end(self) -> None:
        with self._fed:
            self._ended = True
            self._fed.notify()

    def read(self, size: int, /) -> bytes:
        with self._fed:
            while not self._data and not self._ended:
                self._fed.wait()
            taken = bytes(self._data[:size])
            del self._data[:size]
            return taken


class Lines:
    """A sink whose lines can be waited for."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._came = threading.Condition()

    def write(self, line: bytes, /) -> None:
        with self._came:
            self.data += line
            self._came.notify_all()

    def flush(self) -> None: ...

    def parsed(self) -> list[tuple[str, dict[str, Any]]]:
        return answers(bytes(self.data))

    def wait_for(self, tag: str, count: int = 1) -> None:
        wanted = f"BMOE_{tag} ".encode()
        with self._came:
            assert self._came.wait_for(lambda: self.data.count(wanted) >= count, WAIT_S), (tag, bytes(self.data)[-500:])


class Running:
    """A server in a thread of its own."""

    def __init__(self, session: Any = None, watchers: Sequence[Watcher] = (), **options: Any) -> None:
        self.session = session or FakeSession()
        self.source, self.sink = Pipe(), Lines()
        self.notes: list[str] = []
        self.end: End | None = None
        self.raised: BaseException | None = None
        self.server = Server(
            self.session, self.source, Outlet(self.sink), watchers=watchers, note=self.notes.append, **options
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.end = self.server.run()
        except BaseException as error:
            self.raised = error

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        self.source.end()
        return self.wait()

    def wait(self) -> list[tuple[str, dict[str, Any]]]:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), bytes(self.sink.data)[-500:]
        return self.sink.parsed()


def encoded(line: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(line, dict):
        line = json.dumps(line)
    return line.encode() if isinstance(line, str) else line


def served(*lines: bytes | str | dict[str, Any], session: Any = None, **options: Any) -> list[tuple[str, Any]]:
    """The lines that requests, and the end of the input after them, are answered with."""
    sink = Lines()
    source = io.BytesIO(b"\n".join(map(encoded, lines)))
    assert Server(session or FakeSession(), source, Outlet(sink), **options).run() is End.CLOSED
    return sink.parsed()


def answers(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Lines of the protocol, each checked to be one."""
    assert data == b"" or data.endswith(b"\n")
    parsed = []
    for line in data.split(b"\n")[:-1]:
        match = re.fullmatch(rb"BMOE_([A-Z]+) (\{[ -~]*\})", line)
        assert match, line
        parsed.append((match[1].decode(), json.loads(match[2], parse_constant=_no_constant)))
    return parsed


def finals(parsed: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(tag, record) for tag, record in parsed if tag in FINAL]


def table(heading: str) -> dict[str, tuple[str, ...]]:
    """The table under a heading of the contract: first cell without quotes → the others."""
    text = DOC.read_text(encoding="utf-8")
    section = re.split(r"^##", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, flags=re.MULTILINE)
    assert rows, heading
    return {name: tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", rest)) for name, rest in rows}


def check(tag: str, record: dict[str, Any]) -> None:
    """A line's keys are those of its table in the contract, in order, and of their types."""
    documented = table(f"BMOE_{tag}")
    assert list(record) == list(documented)
    for key, value in record.items():
        assert _is_of(value, documented[key][0]), (tag, key, value)


def _is_of(value: object, kind: str) -> bool:
    if kind == "list of float or null":
        return isinstance(value, list) and all(item is None or _is_of(item, "float") for item in value)
    if kind == "id":
        return not isinstance(value, (list, dict))
    types: dict[str, type] = {"int": int, "float": float, "text": str, "bool": bool}
    return type(value) is types[kind] and (kind != "float" or math.isfinite(float(str(value))))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
