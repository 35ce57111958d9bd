import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bmoe import DecideRequest, DecideResult, Refused, Session, batch
from bmoe.batch import BatchError, Tally
from tests.fakes import ScriptedEngine

REQUESTS = [
    {"id": number, "prefix": "one two three", "suffix": f" {number}", "choices": ["A", "B"]} for number in range(6)
]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return written(tmp_path / "requests.jsonl", *map(json.dumps, REQUESTS))


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def run(
    requests: Path,
    out: Path,
    *,
    restart: bool = False,
    stop_after: int | None = None,
    engine: ScriptedEngine | None = None,
    **settings: Any,
) -> Tally:
    session = Session(engine or ScriptedEngine())
    asked = 0

    def decide(request: DecideRequest) -> DecideResult:
        nonlocal asked
        if asked == stop_after:
            raise KeyboardInterrupt
        asked += 1
        return session.decide(request)

    lines = batch.read_lines(requests.read_bytes(), settings)
    with batch.results_file(out, requests) as descriptor:
        if restart:
            batch.clear(descriptor)
        done = batch.resume(descriptor, out, lines)
        return batch.run(lines, done, descriptor, decide=decide, letter=session.lettered)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="ascii").splitlines()]


def steady(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs from run to run: times, and what was reused."""
    return [
        {key: value for key, value in record.items() if not key.endswith(("_s", "_mib", "_reused", "_prefilled"))}
        for record in records
    ]


def test_every_request_has_its_line_in_order(requests: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    tally = run(requests, out)
    assert (tally.n_requests, tally.n_decided, tally.n_refused, tally.n_resumed) == (6, 6, 0, 0)
    assert [(r["index"], r["line"], r["id"]) for r in records(out)] == [(n, n + 1, n) for n in range(6)]
    assert all(len(r["choice_logp"]) == 2 for r in records(out))


def test_equal_prefixes_are_reused(requests: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    run(requests, out)
    assert [r["n_reused"] > 0 for r in records(out)] == [False] + [True] * 5


def test_a_bad_line_is_a_record_and_the_rest_goes_on(tmp_path: Path) -> None:
    requests = written(
        tmp_path / "r.jsonl",
        '{"prefix":"p","choices":["A","B"]}',
        "{oops",
        '{"id":"x","prefix":"p","choices":["A","A "]}',
        "",
        '{"question":"Which?","options":["billing","sales"]}',
    )
    out = tmp_path / "out.jsonl"
    tally = run(requests, out)
    assert (tally.n_requests, tally.n_decided, tally.n_refused) == (4, 2, 2)
    good, oops, collide, lettered = records(out)
    assert (good["line"], oops["line"], collide["line"], lettered["line"]) == (1, 2, 3, 5)
    assert "not JSON" in oops["error"]
    assert "both begin with" in collide["error"]
    assert collide["id"] == "x"
    assert lettered["options"] == ["billing", "sales"]
    assert not {"best", "choice_logp"} & (set(oops) | set(collide))


def test_a_line_that_breaks_the_logits_is_a_record_and_the_rest_goes_on(requests: Path, tmp_path: Path) -> None:
    engine, out = ScriptedEngine(), tmp_path / "out.jsonl"
    read = engine.logits
    broken = iter([False, True])
    engine.logits = lambda: read() * (math.nan if next(broken, False) else 1)  # type: ignore[method-assign]
    tally = run(requests, out, engine=engine)
    assert (tally.n_decided, tally.n_refused) == (5, 1)
    assert ["error" in record for record in records(out)] == [False, True, False, False, False, False]
    assert "logits are broken" in records(out)[1]["error"]
    assert run(requests, out).n_resumed == 6


def test_line_ends_bom_and_a_last_line_without_one(tmp_path: Path) -> None:
    requests = tmp_path / "r.jsonl"
    line = b'{"prefix":"p","choices":["A","B"]}'
    requests.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    out = tmp_path / "out.jsonl"
    assert run(requests, out).n_decided == 2
    assert b"\r" not in out.read_bytes()
    assert out.read_bytes().endswith(b"}\n")


class TestResume:
    def test_an_interrupted_run_goes_on_where_it_stopped(self, requests: Path, tmp_path: Path) -> None:
        whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
        run(requests, whole)
        with pytest.raises(KeyboardInterrupt):
            run(requests, out, stop_after=2)
        assert len(records(out)) == 2
        tally = run(requests, out)
        assert (tally.n_resumed, tally.n_decided) == (2, 6)
        assert steady(records(out)) == steady(records(whole))

    def test_a_finished_run_asks_nothing(self, requests: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        run(requests, out)
        before = out.read_bytes()
        assert run(requests, out, stop_after=0).n_resumed == 6
        assert out.read_bytes() == before

    @pytest.mark.parametrize("cut", [1, 2, 40])
    def test_a_torn_last_line_is_answered_again(self, requests: Path, tmp_path: Path, cut: int) -> None:
        whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
        run(requests, whole)
        out.write_bytes(whole.read_bytes()[:-cut])
        assert run(requests, out).n_resumed == 5
        assert steady(records(out)) == steady(records(whole))

    def test_refusals_are_not_asked_again(self, tmp_path: Path) -> None:
        requests, out = written(tmp_path / "r.jsonl", "{oops", "{oops2"), tmp_path / "out.jsonl"
        run(requests, out)
        tally = run(requests, out)
        assert (tally.n_resumed, tally.n_refused) == (2, 2)

    def test_requests_added_at_the_end_are_answered(self, requests: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        run(requests, out)
        with requests.open("a") as more:
            more.write('{"prefix":"new","choices":["A","B"]}\n')
        tally = run(requests, out)
        assert (tally.n_resumed, tally.n_decided) == (6, 7)

    @pytest.mark.parametrize("change", ["edited", "shorter", "settings", "foreign", "not json"])
    def test_results_of_something_else_are_left_alone(self, requests: Path, tmp_path: Path, change: str) -> None:
        out = tmp_path / "out.jsonl"
        run(requests, out)
        settings: dict[str, Any] = {}
        if change == "edited":
            written(requests, *map(json.dumps, [{**REQUESTS[0], "suffix": "!"}, *REQUESTS[1:]]))
        elif change == "shorter":
            written(requests, *map(json.dumps, REQUESTS[:3]))
        elif change == "settings":
            settings = {"model": "another.gguf"}
        elif change == "foreign":
            written(out, '{"hello": "world"}')
        else:
            written(out, "my diary")
        before = out.read_bytes()
        with pytest.raises(Refused, match=r"no result of request .*--restart"):
            run(requests, out, **settings)
        assert out.read_bytes() == before
        assert run(requests, out, restart=True, **settings).n_resumed == 0
        assert len(records(out)) == len(batch.read_lines(requests.read_bytes(), {}))

    def test_a_killed_process_goes_on(self, requests: Path, tmp_path: Path) -> None:
        whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
        run(requests, whole)
        code = f"""
            import os, signal
            from pathlib import Path
            from bmoe import batch
            from tests.test_batch import run
            import tests.test_batch as here
            write, n = os.write, 0
            def die_in_the_middle(descriptor, data):
                global n
                n += 1
                if n == 4:
                    write(descriptor, data[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(descriptor, data)
            os.write = die_in_the_middle
            run(Path({str(requests)!r}), Path({str(out)!r}))
        """
        killed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            check=False,
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert killed.returncode == -signal.SIGKILL
        assert not out.read_bytes().endswith(b"\n")
        assert run(requests, out).n_resumed == 3
        assert steady(records(out)) == steady(records(whole))


class TestFiles:
    def test_clearing_what_is_no_file_is_nothing(self) -> None:
        with batch.results_file(Path(os.devnull), Path("requests.jsonl")) as descriptor:
            batch.clear(descriptor)

    def test_results_that_cannot_be_cleared_are_a_sentence(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(descriptor: int, length: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "ftruncate", refuse)
        with pytest.raises(BatchError, match="cannot clear the earlier results: Input/output error"):
            run(requests, tmp_path / "out.jsonl", restart=True)

    def test_the_requests_are_never_written_over(self, requests: Path, tmp_path: Path) -> None:
        before = requests.read_bytes()
        link = tmp_path / "link.jsonl"
        link.symlink_to(requests)
        hard = tmp_path / "hard.jsonl"
        hard.hardlink_to(requests)
        for out in (requests, link, hard, tmp_path / "." / "requests.jsonl"):
            with pytest.raises(Refused, match="is the file of requests"):
                run(requests, out, restart=True)
        assert requests.read_bytes() == before

    def test_two_writers_at_once_are_one_too_many(self, requests: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        held = batch.results_file(out, requests)
        with held, pytest.raises(Refused, match="another process is writing"):
            run(requests, out, restart=True)

    def test_a_full_disk_is_a_sentence(self, requests: Path) -> None:
        with pytest.raises(BatchError, match="cannot write result 1: No space left on device"):
            run(requests, Path("/dev/full"))

    def test_a_write_that_takes_only_some_is_continued(
        self, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        out = tmp_path / "out.jsonl"
        run(requests, out)
        assert len(records(out)) == 6
