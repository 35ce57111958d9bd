"""A real `bmoe session` over pipes: its start, its ends, and what is on stdout at any time."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bmoe.trace import COLUMNS
from tests.protocol.fake import FINAL, WAIT_S, answers, check, finals
from tests.protocol.host import FLAGS, ROOT, SESSION, SLOW, begin_slowly, decide, environment, generate, hosted, run


class TestServing:
    def test_all_kinds_of_lines(self, model: Path) -> None:
        data = b"\n".join(
            json.dumps(line).encode()
            for line in (decide(1), generate(2), {"cmd": "what"}, decide(3, choices=["A", "A"]))
        )
        done = run(*SESSION, "-m", str(model), *FLAGS, data=data)
        assert (done.returncode, done.stderr) == (0, b"")
        tags = [tag for tag, _ in answers(done.stdout) if tag != "LOAD"]
        assert tags == ["READY", "BEGIN", "DECIDE", "BEGIN", *["PROGRESS"] * 5, "DONE", "ERROR", "BEGIN", "ERROR"]

    def test_every_line_is_as_the_contract_says(self, model: Path) -> None:
        """Also where there is nothing to measure: no token asked for, a prompt that is all there, a refused request."""
        lines = [
            decide(1),
            decide(1),
            decide(2, reuse_prefix=False),
            generate(3, prompt="My name is é.", stop=["zz"]),
            generate(4, prompt="What is it?", clear_kv=False, temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=7),
            decide(5),
            generate(6, prompt="And now?", clear_kv=False),
            generate(7, n_predict=0),
            generate(8, n_predict=0),
            generate(9, prompt="raw", template=False),
            generate(10, template=False, clear_kv=False),
            decide(11, choices=["A", "A"]),
        ]
        done = run(*SESSION, "-m", str(model), *FLAGS, data=b"\n".join(json.dumps(line).encode() for line in lines))
        assert done.returncode == 0
        parsed = answers(done.stdout)
        for tag, record in parsed:
            check(tag, record)
        assert [(tag, record["id"]) for tag, record in parsed if tag in FINAL] == [
            *[("DECIDE", 1), ("DECIDE", 1), ("DECIDE", 2), ("DONE", 3), ("DONE", 4), ("DECIDE", 5), ("DONE", 6)],
            *[("DONE", 7), ("DONE", 8), ("DONE", 9), ("ERROR", 10), ("ERROR", 11)],
        ]
        turns = {record["id"]: record for tag, record in parsed if tag == "DONE"}
        assert turns[4]["n_reused"] > 0
        assert turns[6]["n_reused"] > turns[4]["n_reused"]
        assert (turns[7]["tokens"], turns[7]["tok_s"], turns[7]["text"]) == (0, 0.0, "")

    def test_a_turn_cancelled_before_its_first_token(self, model: Path) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            host.lines.wait_for("READY")
            host.send(generate(1, prompt=SLOW["prefix"]))
            host.lines.wait_for("BEGIN")
            time.sleep(0.3)
            host.send({"cmd": "cancel"}, generate(2, prompt="x", clear_kv=False), {"cmd": "cancel"}, generate(3))
            assert host.finish() == 0
            for tag, record in host.parsed:
                check(tag, record)
            first, _, third = (record for _, record in host.finals)
        assert (first["ending"], first["tokens"], first["tok_s"], first["text"]) == ("cancelled", 0, 0.0, "")
        assert third["ending"] == "length"

    def test_loading_is_told_up_to_the_whole_file(self, model: Path) -> None:
        parsed = answers(run(*SESSION, "-m", str(model), *FLAGS).stdout)
        loads = [record for tag, record in parsed if tag == "LOAD"]
        assert loads[-1]["mb"] == model.stat().st_size / 1e6
        assert parsed[-1][0] == "READY"
        assert sorted(record["mb"] for record in loads) == [record["mb"] for record in loads]

    def test_without_decide_a_decision_is_refused(self, model: Path) -> None:
        data = json.dumps(decide(1)).encode() + b"\n" + json.dumps(generate(2)).encode()
        done = run(*SESSION, "-m", str(model), "-c", "512", data=data)
        finals = [(tag, record) for tag, record in answers(done.stdout) if tag in ("ERROR", "DONE")]
        assert finals[0] == ("ERROR", {"id": 1, "fatal": False, "msg": "this session was opened without decisions"})
        assert finals[1][0] == "DONE"

    def test_a_prompt_beyond_the_context_is_refused(self, model: Path) -> None:
        data = json.dumps(decide(1, prefix="x " * 1_000_000)).encode() + b"\n" + json.dumps(decide(2)).encode()
        done = run(*SESSION, "-m", str(model), *FLAGS, data=data)
        assert [tag for tag, _ in answers(done.stdout)][-4:] == ["BEGIN", "ERROR", "BEGIN", "DECIDE"]

    def test_progress_and_verbose_are_on_stderr(self, model: Path) -> None:
        data = json.dumps(decide(1)).encode() + b"\n" + json.dumps(generate(2)).encode()
        done = run(*SESSION, "-m", str(model), *FLAGS, "--progress", "--verbose", data=data)
        answers(done.stdout)
        assert b"decide 1:" in done.stderr
        assert b"generate 2:" in done.stderr
        assert len(done.stderr.splitlines()) > 10


class TestStreamed:
    FLAGS = (*FLAGS, "--moe-stream", "--cache-mb", "0")

    def test_lines_are_as_the_contract_says_and_tell_what_was_read(self, moe: Path) -> None:
        data = b"\n".join(json.dumps(line).encode() for line in (decide(1), generate(2)))
        answered = [
            answers(run(*SESSION, "-m", str(moe), *flags, data=data).stdout)
            for flags in ((*FLAGS, "--no-repack"), (*self.FLAGS, "--no-repack", "--prefetch", "off"))
        ]
        for tag, record in answered[1]:
            check(tag, record)
        resident, streamed = (
            [record for tag, record in parsed if tag in ("DECIDE", "DONE", "PROGRESS")] for parsed in answered
        )
        assert streamed[0]["choice_logp"] == resident[0]["choice_logp"]
        assert streamed[-1]["text"] == resident[-1]["text"]
        decision, first, second, *_, turn = streamed
        for record in (decision, turn):
            assert record["prefill_read_mib"] > 0 < record["prefill_routed_mib"]
            assert record["prefill_io_s"] > 0 < record["prefill_stall_s"]
            assert record["cache_hit_pct"] == 0.0
        assert first["read_mb"] == 0.0 < second["read_mb"]
        assert turn["read_mib"] > 0 < turn["io_s_tok"]
        zeros = ("prefill_read_mib", "prefill_io_s", "prefill_stall_s", "prefill_mgmt_s", "cache_hit_pct")
        assert {record[key] for record in (resident[0], resident[-1]) for key in zeros} == {0.0}

    def test_a_file_that_changes_in_use_ends_the_session(self, moe: Path, tmp_path: Path) -> None:
        path = tmp_path / "mine.gguf"
        path.write_bytes(moe.read_bytes())
        with hosted(*SESSION, "-m", str(path), *self.FLAGS) as host:
            host.lines.wait_for("READY")
            host.send(decide(1))
            host.lines.wait_for("DECIDE")
            with path.open("ab") as file:
                file.write(b"more")
            host.send(decide(2), decide(3))
            assert host.wait() == 1
            (_, failed, waiting) = (record for _, record in host.finals)
        assert (failed["id"], failed["fatal"], waiting["id"], waiting["fatal"]) == (2, True, 3, True)
        assert "changed while it was open" in failed["msg"]
        assert "mine.gguf" in failed["msg"]

    def test_what_streams_is_said_on_stderr_only_when_asked(self, moe: Path) -> None:
        quiet, told = (run(*SESSION, "-m", str(moe), *self.FLAGS, *more) for more in ((), ("--progress",)))
        assert b"streamed" not in quiet.stderr
        assert b"bmoe session: 1 MiB of experts in 3 layers are streamed; cache: 0 MiB; " in told.stderr

    def test_a_flag_without_moe_stream_is_said_once(self, moe: Path) -> None:
        done = run(*SESSION, "-m", str(moe), *FLAGS, "--cache-mb", "auto")
        assert done.stderr == b"bmoe session: --cache-mb does nothing without --moe-stream\n"
        assert done.returncode == 0

    def test_a_wrong_budget_is_told_the_host(self, moe: Path) -> None:
        done = run(*SESSION, "-m", str(moe), *FLAGS, "--moe-stream", "--cache-mb", "-5")
        ((tag, record),) = answers(done.stdout)
        assert (done.returncode, tag, record["fatal"]) == (2, "ERROR", True)
        assert "--cache-mb must be auto or a whole number of MiB" in record["msg"]


class TestEnds:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_ends_what_runs_with_its_line(self, model: Path, number: int, code: int) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            begin_slowly(host)
            host.send(decide("waiting"))
            time.sleep(0.2)
            sent = time.monotonic()
            host.process.send_signal(number)
            assert host.wait() == code
            assert time.monotonic() - sent < 10
            (slow, waiting) = host.finals
            assert (slow[0], slow[1]["id"], slow[1]["cancelled"]) == ("DECIDE", "slow", True)
            assert (waiting[0], waiting[1]["id"], waiting[1]["fatal"]) == ("ERROR", "waiting", False)
            assert "Traceback" not in host.errors

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_while_idle(self, model: Path, number: int, code: int) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            host.lines.wait_for("READY")
            host.process.send_signal(number)
            assert host.wait() == code
            assert "Traceback" not in host.errors

    def test_two_signals_at_once_are_one(self, model: Path) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            begin_slowly(host)
            for _ in range(20):
                host.process.send_signal(signal.SIGINT)
                time.sleep(0.01)
            assert host.wait() == 130
            assert host.finals[0][1]["cancelled"]

    def test_a_second_signal_ends_a_session_that_nobody_reads(self, model: Path) -> None:
        reading, writing = os.pipe()
        with hosted(*SESSION, "-m", str(model), *FLAGS, stdout=writing) as host:
            os.close(writing)
            os.read(reading, 100)
            host.send(*[{"cmd": "x" * 30}] * 5000)  # their errors fill the pipe
            time.sleep(1)
            host.process.send_signal(signal.SIGTERM)
            time.sleep(1.3)
            assert host.process.poll() is None
            host.process.send_signal(signal.SIGTERM)
            assert host.wait() == 143
        os.close(reading)

    def test_an_ignored_signal_stays_ignored(self, model: Path) -> None:
        command = " ".join([*SESSION, "-m", str(model), *FLAGS])
        with hosted("bash", "-c", f"trap '' INT; exec {command}") as host:
            host.lines.wait_for("READY")
            host.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            host.send(decide(1))
            assert host.finish() == 0
            assert host.finals[0][0] == "DECIDE"

    def test_a_signal_while_opening(self, model: Path) -> None:
        code = (
            "import os, signal, sys, bmoe.cli.session as s\n"
            "def send(self, fraction): os.kill(os.getpid(), signal.SIGTERM)\n"
            "s._Loading.__call__ = send\n"
            "from bmoe.cli.app import main\n"
            "sys.exit(main())"
        )
        done = run(sys.executable, "-c", code, "session", "-m", str(model), *FLAGS)
        assert done.returncode == 143
        assert answers(done.stdout) == [("ERROR", {"id": None, "fatal": True, "msg": "stopped by SIGTERM"})]
        assert done.stderr == b""

    def test_the_reading_end_closes_in_mid_decide(self, model: Path) -> None:
        reading, writing = os.pipe()
        with hosted(*SESSION, "-m", str(model), *FLAGS, stdout=writing) as host:
            os.close(writing)
            host.send(SLOW)
            while b"BMOE_BEGIN" not in os.read(reading, 1000):
                pass
            time.sleep(0.3)
            os.close(reading)
            closed = time.monotonic()
            assert host.wait() == 0
            assert time.monotonic() - closed < 5
            assert host.errors == ""

    def test_a_reader_of_one_line(self, model: Path) -> None:
        command = " ".join([*SESSION, "-m", str(model), *FLAGS])
        lines = "\n".join(json.dumps(decide(number)) for number in range(50))
        done = run("bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}", data=lines.encode())
        assert done.stdout.startswith(b"BMOE_")
        assert done.stdout.endswith(b"\n0\n")
        assert done.stderr == b""

    def test_a_kill_leaves_whole_rows_and_no_process(self, model: Path, tmp_path: Path) -> None:
        trace = tmp_path / "trace.csv"
        with hosted(*SESSION, "-m", str(model), *FLAGS, "--csv", str(trace), start_new_session=True) as host:
            host.lines.wait_for("READY")
            group = host.process.pid
            host.send(*(decide(number) for number in range(5)), generate("long", n_predict=100_000))
            host.lines.wait_for("PROGRESS", 20)
            host.process.kill()
            assert host.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
        data = trace.read_bytes()
        assert data.endswith(b"\n")
        rows = list(csv.reader(data.decode("ascii").splitlines()))
        assert tuple(rows[0]) == COLUMNS
        assert all(len(row) == len(COLUMNS) for row in rows)
        kinds = [row[COLUMNS.index("kind")] for row in rows[1:]]
        assert kinds[:5] == ["decision"] * 5
        assert len(kinds) >= 24
        assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv"]

    def test_what_never_reaches_the_session_has_a_number_in_both_traces(self, moe: Path, tmp_path: Path) -> None:
        traces = (tmp_path / "t.csv", tmp_path / "r.csv")
        flags = ("-c", "512", "--csv", str(traces[0]), "--route-trace", str(traces[1]))  # without --decide
        lines = (decide(1), generate(2, n_predict=2))
        done = run(*SESSION, "-m", str(moe), *flags, data="\n".join(map(json.dumps, lines)).encode())
        assert done.returncode == 0
        assert [tag for tag, _ in finals(answers(done.stdout))] == ["ERROR", "DONE"]
        for path in traces:
            with path.open(newline="") as file:
                assert {row["seq"] for row in csv.DictReader(file)} == {"2"}, path

    def test_its_host_dies(self, model: Path) -> None:
        """Both ends of its pipes close at once: it does not compute on for nobody."""
        slow = json.dumps(SLOW).encode() + b"\n"
        code = (
            "import subprocess, sys, time, json\n"
            f"child = subprocess.Popen({[*SESSION, '-m', str(model), *FLAGS]!r}, stdin=subprocess.PIPE, "
            "stdout=subprocess.PIPE)\n"
            f"child.stdin.write({slow!r}); child.stdin.flush()\n"
            "while not child.stdout.readline().startswith(b'BMOE_BEGIN'): pass\n"
            "print(child.pid, flush=True); time.sleep(100)"
        )
        host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment(), cwd=ROOT)
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        host.kill()
        host.wait(WAIT_S)
        host.stdout.close()
        deadline = time.monotonic() + 10
        while _is_running(pid):
            assert time.monotonic() < deadline, "it computes on"
            time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestCancel:
    def test_a_long_prompt_stops_soon_and_leaves_nothing(self, model: Path) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            begin_slowly(host)
            sent = time.monotonic()
            host.send({"cmd": "cancel"})
            host.lines.wait_for("DECIDE")
            assert time.monotonic() - sent < 5
            host.send(decide("after"))
            assert host.finish() == 0
            slow, after = (record for _, record in host.finals)
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            host.lines.wait_for("READY")
            host.send(decide("fresh"))
            assert host.finish() == 0
            ((_, fresh),) = host.finals
        assert slow["cancelled"]
        assert slow["n_prefilled"] < slow["n_tokens"]
        assert after["choice_logp"] == fresh["choice_logp"]
        assert after["n_reused"] == 0

    def test_a_turn_stops(self, model: Path) -> None:
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            host.lines.wait_for("READY")
            host.send(generate(1, n_predict=1_000_000))
            host.lines.wait_for("PROGRESS", 3)
            host.send({"cmd": "cancel"})
            host.lines.wait_for("DONE")
            assert host.finish() == 0
            ((_, done),) = host.finals
            deltas = [record["delta_text"] for tag, record in host.parsed if tag == "PROGRESS"]
        assert (done["cancelled"], done["ending"]) == (True, "cancelled")
        assert "".join(deltas) == done["text"]

    @pytest.mark.slow
    def test_five_hundred_at_random_moments(self, model: Path) -> None:
        """Around the end of a short decide: one end each, and the next request answers as a fresh session."""
        plain = {"prefix": "", "suffix": "one two three " * 8}
        with hosted(*SESSION, "-m", str(model), *FLAGS) as host:
            host.lines.wait_for("READY")
            started = time.monotonic()
            host.send(decide("fresh", **plain, reuse_prefix=False))
            host.lines.wait_for("DECIDE")
            takes_s = time.monotonic() - started
            random_ = random.Random(7)
            for number in range(500):
                host.send(decide(number, **plain, reuse_prefix=False))
                time.sleep(takes_s * random_.uniform(0, 1.5))
                host.send({"cmd": "cancel"})
                host.lines.wait_for("DECIDE", 2 * number + 2)
                host.send(decide(f"after {number}", **plain, reuse_prefix=False))
                host.lines.wait_for("DECIDE", 2 * number + 3)
            assert host.finish() == 0
            (_, fresh), *others = host.finals
        assert len(others) == 1000
        assert all(record["choice_logp"] in ([], fresh["choice_logp"]) for _, record in others)
        assert all(record["choice_logp"] == fresh["choice_logp"] for _, record in others[1::2])
        n_cancelled = sum(record["cancelled"] for _, record in others)
        assert 0 < n_cancelled < 500
