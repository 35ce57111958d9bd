"""The loop of a session, over streams in memory and a session without a model."""

import dataclasses
import json
import random
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from bmoe import Refused, Session
from bmoe.cli.narrator import Narrator
from bmoe.decide import BadLogits, DecideRequest
from bmoe.generate import GenerateRequest
from bmoe.lines import Overlong, lines
from bmoe.protocol import MAX_LINE_BYTES
from bmoe.serve import End, Outlet, Server
from bmoe.trace import COLUMNS, CsvTrace
from bmoe_native.errors import ArgumentError, EngineError, ReadError
from tests.fakes import ScriptedEngine
from tests.protocol.fake import WAIT_S, FakeSession, Lines, Pipe, Running, a_step, finals, served

CANCEL, CLOSE = {"cmd": "cancel"}, {"cmd": "close"}


def decide(request_id: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"cmd": "decide", "id": request_id, "prefix": "one two ", "suffix": "three", "choices": ["A", "B"], **fields}


def generate(request_id: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"cmd": "generate", "id": request_id, "prompt": "p", "n_predict": 3, **fields}


def ids(parsed: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [record["id"] for _, record in finals(parsed)]


def tags(parsed: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [tag for tag, _ in parsed]


class TestRequests:
    def test_a_decision(self) -> None:
        assert served(decide("é")) == [
            ("BEGIN", {"id": "é"}),
            ("DECIDE", served(decide("é"))[1][1]),
        ]

    def test_a_turn_has_a_line_for_each_token(self) -> None:
        parsed = served(generate())
        assert tags(parsed) == ["BEGIN", "PROGRESS", "PROGRESS", "PROGRESS", "DONE"]
        assert "".join(record["delta_text"] for tag, record in parsed if tag == "PROGRESS") == parsed[-1][1]["text"]

    def test_the_end_of_the_input_finishes_the_queue(self) -> None:
        parsed = served(*(decide(number) for number in range(5)))
        assert ids(parsed) == [0, 1, 2, 3, 4]
        assert tags(finals(parsed)) == ["DECIDE"] * 5

    def test_close_finishes_the_queue_and_reads_no_further(self) -> None:
        running = Running()
        running.source.feed(decide(1), generate(2), CLOSE, decide(3))
        assert ids(running.wait()) == [1, 2]
        assert running.end is End.CLOSED

    def test_two_requests_may_have_one_id(self) -> None:
        assert ids(served(decide(7), decide(7))) == [7, 7]

    def test_errors_keep_their_place(self) -> None:
        parsed = served(decide(1), "what?", decide(2), decide(3, choices="AB"), generate(4))
        assert [(tag, record["id"]) for tag, record in finals(parsed)] == [
            ("DECIDE", 1),
            ("ERROR", None),
            ("DECIDE", 2),
            ("ERROR", 3),
            ("DONE", 4),
        ]

    @pytest.mark.parametrize("error", [Refused("no"), BadLogits("no"), ArgumentError("no")])
    def test_a_refusal_is_not_fatal(self, error: Exception) -> None:
        session = FakeSession()

        def fail(request: Any) -> None:
            if request.prefix == "bad":
                raise error

        session.fail = fail
        parsed = served(decide(1, prefix="bad"), decide(2), session=session)
        assert tags(parsed) == ["BEGIN", "ERROR", "BEGIN", "DECIDE"]
        assert parsed[1][1] == {"id": 1, "fatal": False, "msg": "no"}

    def test_a_session_without_decisions_refuses_them(self) -> None:
        parsed = served(decide(1), session=Session(ScriptedEngine(), decide=False))
        assert parsed[-1] == ("ERROR", {"id": 1, "fatal": False, "msg": "this session was opened without decisions"})

    def test_unknown_keys_are_said_once_each(self) -> None:
        notes: list[str] = []
        assert tags(finals(served(*[decide(1, think=True, é=1)] * 3, note=notes.append))) == ["DECIDE"] * 3
        assert notes == ["the key 'think' is unknown and ignored", r"the key '\xe9' is unknown and ignored"]

    def test_a_host_with_many_keys_is_not_repeated_for_ever(self) -> None:
        notes: list[str] = []
        served(decide(1, **{f"key{number}": 1 for number in range(1000)}), note=notes.append)
        assert len(notes) == 100


class TestFatal:
    def test_an_engine_error_takes_the_queue_with_it(self) -> None:
        session = FakeSession()

        def fail(request: Any) -> None:
            running.source.feed(decide(2), "bad line", generate(3))
            running.source.end()
            time.sleep(0.1)
            raise EngineError("llama.cpp failed")

        session.fail = fail
        running = Running(session)
        running.source.feed(decide(1))
        parsed = running.wait()
        assert running.end is End.FATAL
        assert ids(parsed) == [1, 2, None, 3]
        assert all(record["fatal"] for _, record in finals(parsed))
        assert parsed[1][1]["msg"] == "llama.cpp failed"

    def test_an_expert_that_cannot_be_read_is_named(self) -> None:
        session = FakeSession()
        message = "expert 5 of layer 3: cannot read 4096 bytes at 8192 of m.gguf: Input/output error"

        def fail(request: Any) -> None:
            raise ReadError(message)

        session.fail = fail
        running = Running(session)
        running.source.feed(decide(1))
        assert running.wait()[-1] == ("ERROR", {"id": 1, "fatal": True, "msg": message})
        assert running.end is End.FATAL

    def test_a_mistake_of_ours_is_told_and_raised(self) -> None:
        session = FakeSession()

        def fail(request: Any) -> None:
            raise KeyError("oops")

        session.fail = fail
        running = Running(session)
        running.source.feed(decide(1))
        assert running.wait()[-1] == ("ERROR", {"id": 1, "fatal": True, "msg": "KeyError: 'oops'"})
        assert isinstance(running.raised, KeyError)


class TestCancel:
    @pytest.mark.parametrize("request_line", [decide(1), generate(1)])
    def test_it_stops_what_runs(self, request_line: dict[str, Any]) -> None:
        running = Running()
        running.session.go.clear()
        running.source.feed(request_line, decide(2))
        assert running.session.running.wait(WAIT_S)
        running.source.feed(CANCEL)
        running.sink.wait_for("BEGIN", 2)
        running.session.go.set()
        parsed = finals(running.finish())
        assert [record["cancelled"] for _, record in parsed] == [True, False]

    def test_right_behind_its_request_it_always_finds_it(self) -> None:
        for _ in range(200):
            running = Running()
            running.session.go.clear()
            running.source.feed(decide(1), CANCEL)
            running.sink.wait_for("DECIDE")
            assert finals(running.finish())[0][1]["cancelled"]

    @pytest.mark.parametrize("line", [decide(1), generate(1)])
    def test_it_is_not_lost_on_a_session_that_is_not_ready_for_it(self, line: dict[str, Any]) -> None:
        session = FakeSession()
        session.go.clear()
        session.starts_after_s = 0.05
        running = Running(session)
        running.source.feed(line)
        running.sink.wait_for("BEGIN")
        time.sleep(0.01)
        running.source.feed(CANCEL)
        assert finals(running.finish())[0][1]["cancelled"]

    def test_behind_a_bad_line_it_finds_the_request(self) -> None:
        running = Running()
        running.session.go.clear()
        running.source.feed("bad", decide(1), CANCEL)
        running.sink.wait_for("DECIDE")
        assert finals(running.finish())[-1][1]["cancelled"]

    @pytest.mark.parametrize("line", [decide(2), generate(2)])
    def test_a_request_can_be_cancelled_while_it_waits(self, line: dict[str, Any]) -> None:
        # Nothing is served while run() has not begun: the reader alone is started.
        session, sink = FakeSession(), Lines()
        source = Pipe()
        server = Server(session, source, Outlet(sink))
        source.feed(line, CANCEL)
        source.end()
        server._read()
        assert server.run() is End.CLOSED
        assert session.asked == []
        begin, (_, final) = sink.parsed()
        assert begin == ("BEGIN", {"id": 2})
        assert final["cancelled"]

    def test_with_nothing_to_stop_it_does_nothing(self) -> None:
        running = Running()
        running.source.feed(CANCEL, CANCEL, decide(1))
        running.sink.wait_for("DECIDE")
        running.source.feed(CANCEL, decide(2), "", CANCEL)
        running.sink.wait_for("DECIDE", 2)
        assert next(record["cancelled"] for _, record in finals(running.finish())) is False

    def test_it_is_read_while_the_queue_is_full(self) -> None:
        running = Running(max_queued_bytes=20_000)
        running.session.go.clear()
        running.source.feed(decide(0))
        assert running.session.running.wait(WAIT_S)
        running.source.feed(*(decide(number) for number in range(1, 1000)), CANCEL)
        running.sink.wait_for("DECIDE")
        running.session.go.set()
        parsed = finals(running.finish())
        assert sorted(ids(parsed)) == list(range(1000))
        assert parsed[-1][0] == "DECIDE"
        refused = [record for tag, record in parsed if tag == "ERROR"]
        assert len(refused) > 900
        assert refused[0] == {"id": refused[0]["id"], "fatal": False, "msg": refused[0]["msg"]}
        assert "the queue is full" in refused[0]["msg"]

    def test_what_was_served_makes_room(self) -> None:
        running = Running(max_queued_bytes=5_000)
        for number in range(100):
            running.session.go.clear()
            running.source.feed(*[decide(number)] * 4)
            time.sleep(0.001)
            running.session.go.set()
            running.sink.wait_for("DECIDE", 4 * number + 4)
        assert tags(finals(running.finish())) == ["DECIDE"] * 400

    def test_five_hundred_at_random_moments(self) -> None:
        """One end each, whatever the moment, and the next request answers as in a fresh session."""
        engine = ScriptedEngine()
        fresh = Session(ScriptedEngine()).decide(prefix="one two ", suffix="three", choices=("A", "B")).choice_logp
        running = Running(Session(engine))
        random.seed(1)
        n_cancelled = 0
        for number in range(500):
            running.source.feed(decide(number))
            time.sleep(random.random() * 0.002)
            running.source.feed(CANCEL)
            running.sink.wait_for("DECIDE", 2 * number + 1)
            running.source.feed(decide(f"next {number}", reuse_prefix=False))
            running.sink.wait_for("DECIDE", 2 * number + 2)
        parsed = finals(running.finish())
        assert len(parsed) == 1000
        for (_, first), (_, following) in zip(parsed[::2], parsed[1::2], strict=True):
            n_cancelled += first["cancelled"]
            assert not following["cancelled"]
        whole = Session(ScriptedEngine()).decide(
            prefix="one two ", suffix="three", choices=("A", "B"), reuse_prefix=False
        )
        assert all(record["choice_logp"] == list(whole.choice_logp) for _, record in parsed[1::2])
        assert all(record["choice_logp"] in ([], list(fresh)) for _, record in parsed[::2])


class TestStop:
    def test_what_runs_is_cancelled_and_what_waits_is_refused(self) -> None:
        running = Running()
        running.session.go.clear()
        running.source.feed(decide(1), decide(2), "bad", generate(3))
        assert running.session.running.wait(WAIT_S)
        time.sleep(0.1)
        running.server.stop()
        parsed = running.wait()
        assert running.end is End.STOPPED
        assert tags(parsed) == ["BEGIN", "DECIDE", "ERROR", "ERROR", "ERROR"]
        assert ids(parsed) == [1, 2, None, 3]
        assert not any(record.get("fatal") for _, record in parsed)

    def test_idle(self) -> None:
        running = Running()
        running.server.stop()
        assert running.wait() == []
        assert running.end is End.STOPPED


class Hangs(Lines):
    """A sink whose reader leaves after some lines."""

    def __init__(self, n_lines: int) -> None:
        super().__init__()
        self.n_lines = n_lines

    def write(self, line: bytes, /) -> None:
        if self.data.count(b"\n") == self.n_lines:
            raise BrokenPipeError
        super().write(line)


@pytest.mark.parametrize("n_lines", range(6))
@pytest.mark.parametrize("line", [decide(1), generate(1), "bad"])
def test_nobody_listens(line: Any, n_lines: int) -> None:
    sink = Hangs(n_lines)
    source = Pipe()
    source.feed(*[line] * 20)
    assert Server(FakeSession(), source, Outlet(sink)).run() is End.UNHEARD
    assert len(sink.parsed()) == n_lines


def test_a_hang_up_stops_what_runs() -> None:
    running = Running()
    running.session.go.clear()
    running.source.feed(decide(1), decide(2))
    assert running.session.running.wait(WAIT_S)
    running.server.hang_up()
    running.wait()
    assert running.end is End.UNHEARD


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    class Full(Lines):
        def write(self, line: bytes, /) -> None:
            raise OSError(28, "No space left on device")

    source = Pipe()
    source.feed(decide(1))
    with pytest.raises(OSError, match="No space left"):
        Server(FakeSession(), source, Outlet(Full())).run()


class Chunks:
    """A source that gives what it likes."""

    def __init__(self, data: bytes, sizes: Any) -> None:
        self._data, self._sizes = data, sizes

    def read(self, size: int, /) -> bytes:
        taken = self._data[: min(size, next(self._sizes))]
        self._data = self._data[len(taken) :]
        return taken


class TestLines:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
    def test_ends_blanks_and_a_byte_order_mark(self, size: int) -> None:
        data = b"\xef\xbb\xbfone\r\n\n \t\r\ntwo\n\r\nthree \xe2\x80\xa8 four\nlast"
        sizes = iter(lambda: size, None)
        assert list(lines(Chunks(data, sizes), 100)) == [b"one", b"two", b"three \xe2\x80\xa8 four", b"last"]

    @pytest.mark.parametrize("size", [1, 3, 5, 64])
    def test_bounds(self, size: int) -> None:
        data = b"12345\n123456\n12345\r\n" + b"x" * 50 + b"\r\n1\n1234567"
        sizes = iter(lambda: size, None)
        found = list(lines(Chunks(data, sizes), 5))
        assert [line if isinstance(line, bytes) else None for line in found] == [
            b"12345",
            None,
            b"12345",
            None,
            b"1",
            None,
        ]
        assert isinstance(found[3], Overlong)
        assert found[3].n_bytes in (50, 51)

    def test_nothing(self) -> None:
        assert list(lines(Chunks(b"", iter(lambda: 9, None)), 5)) == []

    def test_an_overlong_line_is_not_held(self) -> None:
        class Endless:
            n_left = 3 * MAX_LINE_BYTES

            def read(self, size: int, /) -> bytes:
                taken = min(size, self.n_left)
                self.n_left -= taken
                return b"x" * taken

        tracemalloc.start()
        assert list(lines(Endless(), 2**20)) == [Overlong(3 * MAX_LINE_BYTES)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**22

    def test_an_overlong_line_has_one_error_and_the_next_is_served(self) -> None:
        parsed = served("x" * 2000, decide(1), max_line_bytes=1000)
        assert tags(parsed) == ["ERROR", "BEGIN", "DECIDE"]
        assert parsed[0][1] == {"id": None, "fatal": False, "msg": "the line has 2000 bytes, 1000 are allowed"}

    @pytest.mark.parametrize("n_bytes", [70_000, 1_000_000, 10_000_000])
    def test_long_requests_are_served_whole(self, n_bytes: int) -> None:
        session = FakeSession()
        assert tags(served(decide(1, prefix="x" * n_bytes), session=session)) == ["BEGIN", "DECIDE"]
        assert len(session.asked[0].prefix) == n_bytes  # type: ignore[union-attr]

    def test_a_request_at_the_bound_is_served(self) -> None:
        line = json.dumps(decide(1)).encode()
        line += b" " * (MAX_LINE_BYTES - len(line))
        assert tags(served(line)) == ["BEGIN", "DECIDE"]
        assert tags(served(line + b" ")) == ["ERROR"]

    def test_a_broken_input_is_the_end_of_it(self) -> None:
        class Broken:
            def read(self, size: int, /) -> bytes:
                raise OSError(5, "Input/output error")

        assert Server(FakeSession(), Broken(), Outlet(Lines())).run() is End.CLOSED


def test_a_host_that_reads_late_does_not_stall_the_reader() -> None:
    class Slow(Lines):
        ready = threading.Event()

        def write(self, line: bytes, /) -> None:
            assert self.ready.wait(WAIT_S)
            super().write(line)

    source, sink = Pipe(), Slow()
    source.feed(*(decide(number) for number in range(100)), CLOSE)
    threading.Timer(0.2, sink.ready.set).start()
    assert Server(FakeSession(), source, Outlet(sink)).run() is End.CLOSED
    assert ids(sink.parsed()) == list(range(100))


class TestTrace:
    def rows(self, path: Path) -> list[list[str]]:
        data = path.read_bytes()
        assert data.endswith(b"\n")
        return [line.split(",") for line in data.decode("ascii").splitlines()]

    def test_a_row_per_token_turn_and_decision(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        with CsvTrace(path) as trace:
            served(decide(1), generate(2), "bad", decide(3, choices=["A", "A"]), decide(4), watchers=[trace])
        header, *rows = self.rows(path)
        assert tuple(header) == COLUMNS
        assert all(len(row) == len(COLUMNS) for row in rows)
        kinds = [(row[0], row[1], row[2]) for row in rows]
        assert kinds == [
            ("1", "1", "decision"),
            *[("2", "2", "token")] * 3,
            ("2", "2", "prompt"),
            ("4", "4", "decision"),
        ]
        assert rows[0][COLUMNS.index("best_logp")] == "-0.25"

    def test_a_cancelled_decision_and_one_without_mass_have_no_logp(self, tmp_path: Path) -> None:
        session = FakeSession()
        session.logp = float("-inf")
        with CsvTrace(tmp_path / "trace.csv") as trace:
            served(decide(1), watchers=[trace], session=session)
            trace.decided("2", _cancelled())
        assert [row[COLUMNS.index("best_logp")] for row in self.rows(tmp_path / "trace.csv")[1:]] == ["", ""]

    def test_what_was_read(self, tmp_path: Path) -> None:
        session = FakeSession()
        told = {"prefill_read_mib": 1.0, "prefill_io_s": 0.25, "prefill_stall_s": 0.125, "prefill_mgmt_s": 0.0625}
        decision = dataclasses.replace(
            session.decide(DecideRequest(prefix="p", suffix="s", choices=("A", "B"))), **told, cache_hit_pct=50.0
        )
        turn = dataclasses.replace(session.generate(GenerateRequest(prompt="p")), **told, prefill_cache_hit_pct=75.0)
        with CsvTrace(tmp_path / "trace.csv") as trace:
            trace.decided("1", decision)
            trace.done("2", turn)
            trace.stepped("3", a_step(io_s=0.5, stall_s=0.125, read_bytes=1_500_000, cache_hit_pct=12.5))
        names = ("wall_ms", "io_ms", "compute_ms", "mgmt_ms", "stall_ms", "read_mb", "cache_hit_pct")
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows(tmp_path / "trace.csv")[1:]]
        prefill = [500.0, 250.0, 312.5, 62.5, 125.0, 1.048576]
        assert [[float(row[name]) for name in names] for row in rows] == [
            [*prefill, 50.0],
            [*prefill, 75.0],
            [250.0, 500.0, 125.0, 0.0, 125.0, 1.5, 12.5],
        ]

    def test_what_a_device_computed(self, tmp_path: Path) -> None:
        session = FakeSession()
        told = {"prefill_dev_tokens": 64, "prefill_dev_read_mib": 1.0, "prefill_dev_stall_s": 0.25}
        told |= {"prefill_dev_routed": 9, "prefill_dev_demand": 4, "prefill_dev_nodes": 50}
        decision = session.decide(DecideRequest(prefix="p", suffix="s", choices=("A", "B")))
        with CsvTrace(tmp_path / "trace.csv") as trace:
            trace.decided("1", dataclasses.replace(decision, **told))
            trace.done("2", dataclasses.replace(session.generate(GenerateRequest(prompt="p")), **told))
            trace.stepped("3", a_step())
        rows = [row[COLUMNS.index("dev_tokens") :] for row in self.rows(tmp_path / "trace.csv")[1:]]
        assert rows == [["64", "1.048576", "250.0", "9", "4", "50"]] * 2 + [[""] * 6]

    def test_ids_are_json(self, tmp_path: Path) -> None:
        with CsvTrace(tmp_path / "trace.csv") as trace:
            served(decide('é,"\n'), watchers=[trace])
        assert (tmp_path / "trace.csv").read_text().splitlines()[1].startswith(r'1,"""\u00e9,\""\n""",decision')

    def test_it_goes_on_after_whole_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        for _ in range(2):
            with CsvTrace(path) as trace:
                served(decide(1), watchers=[trace])
            with path.open("ab") as torn:
                torn.write(b"1,1,deci")
        with CsvTrace(path):
            pass
        assert [row[2] for row in self.rows(path)] == ["kind", "decision", "decision"]

    def test_a_header_that_was_cut_off_is_written_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_bytes(b"seq,id")
        with CsvTrace(path):
            pass
        assert tuple(self.rows(path)[0]) == COLUMNS

    def test_what_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("my notes\n")
        with pytest.raises(Refused, match="holds something else"):
            CsvTrace(path)
        assert path.read_text() == "my notes\n"
        with pytest.raises(Refused, match="cannot write"):
            CsvTrace(tmp_path / "no" / "such")
        with CsvTrace(tmp_path / "trace.csv"), pytest.raises(Refused, match="another process is writing"):
            CsvTrace(tmp_path / "trace.csv")

    def test_a_full_disk_ends_the_trace_alone(self) -> None:
        notes: list[str] = []
        with CsvTrace(Path("/dev/full"), note=notes.append) as trace:
            assert tags(served(decide(1), watchers=[trace])) == ["BEGIN", "DECIDE"]
        assert notes == ["--csv: /dev/full ends here: No space left on device"]


def _cancelled() -> Any:
    from bmoe.serve import _never_decided

    session = FakeSession()
    served(decide(1), session=session)
    return _never_decided(session.asked[0], 0.0)  # type: ignore[arg-type]


class TestNarrator:
    def test_what_was_read(self) -> None:
        said: list[str] = []
        session = FakeSession()
        decision = session.decide(DecideRequest(prefix="p", suffix="s", choices=("A", "B")))
        turn = session.generate(GenerateRequest(prompt="p", n_predict=2))
        for read in (0.0, 8.0):
            told = {"prefill_read_mib": read, "prefill_routed_mib": 2 * read}
            narrator = Narrator(said.append)
            narrator.decided("1", dataclasses.replace(decision, **told, cache_hit_pct=50.0))
            written = {"read_mib": read / 2, "routed_mib": read, "cache_hit_pct": 25.0}
            narrator.done("2", dataclasses.replace(turn, **told, **written))
        assert not any("read" in line for line in said[:2])
        assert said[2].endswith("computed in 0.50 s (8.0 MiB read, 50 % in memory)")
        assert "of prompt in 0.50 s (8.0 MiB read, 0 % in memory), " in said[3]
        assert "generated in 0.50 s (4.0 MiB read, 25 % in memory), " in said[3]

    def test_what_a_device_computed(self) -> None:
        said: list[str] = []
        session = FakeSession()
        decision = session.decide(DecideRequest(prefix="p", suffix="s", choices=("A", "B")))
        turn = session.generate(GenerateRequest(prompt="p", n_predict=2))
        for read in (0.0, 8.0):
            told = {"prefill_dev_tokens": 64, "prefill_dev_read_mib": read}
            narrator = Narrator(said.append)
            narrator.decided("1", dataclasses.replace(decision, **told))
            narrator.done("2", dataclasses.replace(turn, **told))
        assert said[0].endswith("computed in 0.50 s, 64 of them on the device")
        assert " of prompt in 0.50 s, 64 of them on the device, 2 generated" in said[1]
        assert said[2].endswith(", 64 of them on the device, 8.0 MiB read for it")
        assert " on the device, 8.0 MiB read for it, 2 generated" in said[3]
