"""Lines that nobody would send: none crashes, hangs or goes without its answer.

BMOE_FUZZ_LINES sets how many; `BMOE_FUZZ_LINES=100000` takes about half a minute.
"""

import collections
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe import protocol
from bmoe.decide import Refused
from bmoe.generate import GenerateRequest
from bmoe.serve import End, Outlet, Server
from tests.protocol.fake import FINAL, FakeSession, Lines, answers

N_LINES = int(os.environ.get("BMOE_FUZZ_LINES", "20000"))
WATCHDOG_S = 600
SEEDS = (
    b'{"cmd":"decide","id":1,"prefix":"a b ","suffix":"c","choices":["A","B"],"reuse_prefix":true}',
    b'{"cmd":"decide","id":"\xc3\xa9","prefix":"","suffix":"\\u0000","choices":["\xf0\x9f\x91\x8d","B"],"system":null}',
    b'{"cmd":"generate","id":2,"prompt":"hi","n_predict":3,"think":false,"clear_kv":true}',
    b'{"cmd":"generate","id":9007199254740993,"prompt":"hi","temperature":0.5,"seed":1,"stop":["x"],"n_predict":1}',
    b'{"cmd":"cancel"}',
    b"",
    b"7",
    b"[[[]]]",
)
ATOMS = (
    b'null true false 0 -1 1e400 1.5 NaN Infinity 9007199254740993 [] {} "" "A" [1] ["A"] "\\ud800" \xff \xe2\x82 '
    b'\0 \r , : " \\ \t \xe2\x80\xa8 [[[[ {"a": "cmd" "decide" "generate" "cancel" "id" "prefix" "choices"'
).split(b" ")
HUGE = (b"9" * 5000, b"[" * 5000, b'"' + b"x" * 5000 + b'"', b'{"a":' * 2000)


class Fussy(FakeSession):
    """Refuses some requests, as a session does."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = self._maybe

    def _maybe(self, request: Any) -> None:
        text = request.prompt if isinstance(request, GenerateRequest) else request.prefix
        if len(text) % 7 == 3:
            raise Refused("no \ud800 é")


def mutated(random_: random.Random) -> bytes:
    """A line that was right once, or never was."""
    line = bytearray(random_.choice(SEEDS))
    for _ in range(random_.choice((0, 1, 1, 2, 3, 8))):
        begin = random_.randrange(len(line) + 1)
        end = min(len(line), begin + random_.choice((0, 0, 1, 2, 10)))
        kind = random_.random()
        if kind < 0.3:
            line[begin:end] = random_.choice(ATOMS)
        elif kind < 0.6:
            _replace_value(random_, line)
        elif kind < 0.8:
            line[begin:end] = random_.randbytes(random_.randrange(4))
        elif kind < 0.82:
            line[begin:end] = random_.choice(HUGE)
        elif kind < 0.9:
            line[begin:end] = line[:end]
        else:
            del line[begin:end]
    return bytes(line).replace(b"\n", b" ")


def _replace_value(random_: random.Random, line: bytearray) -> None:
    """A value of another type where one was expected: the likeliest mistake."""
    colons = [index for index, byte in enumerate(line) if byte == ord(":")]
    if not colons:
        return
    begin = random_.choice(colons) + 1
    ends = [index for index in range(begin, len(line)) if line[index] in b",}]"]
    if ends:
        line[begin : ends[0]] = random_.choice((*ATOMS[:17], *HUGE[:3]))


def wanted(line: bytes, *, is_first: bool) -> protocol.Command | None:
    """What a line asks for; None where it is passed over."""
    line = (line.removeprefix(b"\xef\xbb\xbf") if is_first else line).removesuffix(b"\r")
    return protocol.parse(line).command if line.strip(b" \t") else None


class Torn:
    """A source that gives random pieces."""

    def __init__(self, data: bytes, random_: random.Random) -> None:
        self._view, self._random = memoryview(data), random_

    def read(self, size: int, /) -> bytes:
        n_bytes = min(size, self._random.choice((1, 10, 1000, 65536)))
        taken, self._view = self._view[:n_bytes], self._view[n_bytes:]
        return bytes(taken)


def survive(lines: list[bytes], random_: random.Random) -> None:
    """Feed lines through a server, and check that each is answered or passed over as documented."""
    commands = [wanted(line, is_first=number == 0) for number, line in enumerate(lines)]
    closes = [index for index, command in enumerate(commands) if isinstance(command, protocol.Close)]
    commands = commands[: closes[0]] if closes else commands
    sink = Lines()
    server = Server(Fussy(), Torn(b"\n".join(lines), random_), Outlet(sink))
    ends: list[End] = []
    thread = threading.Thread(target=lambda: ends.append(server.run()), daemon=True)
    thread.start()
    thread.join(WATCHDOG_S)
    assert not thread.is_alive(), "hangs"
    assert ends == [End.CLOSED]
    parsed = answers(bytes(sink.data))
    expected = [command for command in commands if command is not None and not isinstance(command, protocol.Cancel)]
    finals = [(tag, record) for tag, record in parsed if tag in FINAL]
    assert len(finals) == len(expected)
    for command, (tag, record) in zip(expected, finals, strict=True):
        assert isinstance(command, (protocol.Decide, protocol.Generate, protocol.Bad))
        assert record["id"] == json.loads(command.id)
        assert tag in {protocol.Decide: ("DECIDE", "ERROR"), protocol.Generate: ("DONE", "ERROR")}.get(
            type(command), ("ERROR",)
        )
        assert not record.get("fatal")
    counts = collections.Counter(tag for tag, _ in parsed)
    assert counts["BEGIN"] == sum(not isinstance(command, protocol.Bad) for command in expected)


def batches(n_lines: int, random_: random.Random) -> Iterator[list[bytes]]:
    while n_lines > 0:
        size = min(n_lines, random_.randrange(1, 4000))
        n_lines -= size
        yield [mutated(random_) for _ in range(size)]


def test_mutated_lines() -> None:
    random_ = random.Random(20240607)
    n_kinds: collections.Counter[str] = collections.Counter()
    for lines in batches(N_LINES, random_):
        survive(lines, random_)
        n_kinds.update(type(wanted(line, is_first=False)).__name__ for line in lines[:200])
    # All kinds of lines were among them, or nothing was tried.
    assert {"Decide", "Generate", "Cancel", "Bad", "NoneType"} <= set(n_kinds)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "cmd",
        "id",
        "prefix",
        "suffix",
        "choices",
        "reuse_prefix",
        "system",
        "template",
        "prompt",
        "n_predict",
        "think",
        "clear_kv",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "other",
    ]
)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=6).flatmap(
    lambda fields: st.sampled_from(["decide", "generate", None]).map(
        lambda name: fields if name is None else {**fields, "cmd": name}
    )
)


@settings(max_examples=500, deadline=None)
@given(OBJECTS)
def test_any_object_is_understood_or_refused(fields: dict[str, Any]) -> None:
    command = protocol.parse(json.dumps(fields).encode()).command
    if isinstance(command, protocol.Bad):
        assert command.message
        assert "\n" not in command.message
    elif isinstance(command, (protocol.Decide, protocol.Generate)):
        answers(protocol.begin(command.id))
        assert json.loads(command.id) == fields.get("id")


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_understood_or_refused(line: bytes) -> None:
    assert protocol.parse(line).command


@pytest.mark.parametrize("line", SEEDS[:4])
def test_every_cut_of_a_request_has_one_answer(line: bytes) -> None:
    for end in range(1, len(line) + 1):
        survive([line[:end], line], random.Random(end))
