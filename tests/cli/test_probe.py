"""bmoe probe, and --decide-probe of the other commands, over a real engine and tiny models."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bmoe import Session
from bmoe.cli.probe_view import strip
from bmoe.probe import ProbeFile, read
from bmoe.probe.course import course
from tests import tiny
from tests.cli.conftest import Terminal
from tests.probe.made import random_record, record
from tests.protocol.fake import answers
from tests.protocol.host import ORIGINAL, SESSION, decide, run

QUESTION = ("Which team should handle this? I was charged twice.", "--option", "billing", "--option", "sales")
RAW = ("--prefix", "one two", "--suffix", " three", "--choice", "a", "--choice", "b", "--choice", "k")


class Real(Terminal):
    """With the real engine behind it."""

    def _open(self, path: Path, **flags: Any) -> Session:
        self.opened.append((path, flags))
        return Session.open(path, **flags)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: tiny.write(folder / f"{arch}.gguf", arch=arch) for arch in ("llama", "deepseek2")}


@pytest.fixture
def probe(tmp_path: Path, models: dict[str, Path]) -> Callable[..., Real]:
    """bmoe probe with a model of experts, or what model says."""

    def call(*argv: str, model: str = "deepseek2", code: int = 0, command: str = "probe") -> Real:
        terminal = Real(cache=tmp_path, environ={})
        flags = ["-t", "1"] if "--from" in argv else ["-m", str(models[model]), "-t", "1"]
        assert terminal(command, *flags, *argv) == code, terminal.err
        return terminal

    return call


def batch(tmp_path: Path, *extra: str) -> str:
    lines = [json.dumps({"prefix": f"one {word}", "choices": ["a", "b"]}) for word in ("two", "three", "four")]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return str(path)


class TestOne:
    def test_a_question(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        seen = probe(*QUESTION, "--record", str(tmp_path / "p.jsonl"))
        (kept,) = read(tmp_path / "p.jsonl")
        came = course(kept)
        assert came is not None
        name = ("A) billing", "B) sales")[kept.best]
        assert f"> {name}" in seen.out
        assert f"1  {name}" in seen.out
        assert f"stays from layer {came.stays_from} of 3" in seen.out
        assert "A billing, B sales" in seen.out
        assert f"  answer {''.join('AB'[answer] for answer in came.answers)}" in seen.out
        for margin in came.margins:
            assert f"{margin:+.2f}" in seen.out
        assert "How concentrated the routing is" in seen.out
        assert "What an expert cache" not in seen.out  # which takes more than one decision
        assert "the final one" not in seen.out
        assert kept.n_prefilled == kept.n_tokens
        assert all(len(line) <= 80 for line in seen.out.splitlines())

    def test_a_dense_model_has_its_layers(self, probe: Callable[..., Real]) -> None:
        seen = probe(*RAW, model="llama")
        assert "stays from layer" in seen.out
        assert "routing" not in seen.out

    @pytest.mark.parametrize("flags", [(), ("--moe-stream", "--cache-mb", "1")])
    def test_json(self, probe: Callable[..., Real], flags: tuple[str, ...]) -> None:
        value = probe(*RAW, "--json", *flags).json()
        assert list(value) == ["model", "decisions", "agreement", "layer_uses", "hit_rates", "refused", "pictures"]
        (decision,) = value["decisions"]
        assert decision["choices"] == ["a", "b", "k"]
        assert decision["answers"][-1] == decision["best"]
        assert len(decision["shares"]) == len(decision["margins"]) == 3
        assert value["model"] == "deepseek2.gguf"
        assert [use["layer"] for use in value["layer_uses"]] == [1, 2]
        assert value["hit_rates"]["lru"][-1] == 0  # the first decision finds an empty cache

    def test_it_answers_as_decide_does(self, probe: Callable[..., Real]) -> None:
        wanted = probe(*RAW, "--json", "--prefix-cache", "off", command="decide").json()["choice_logp"]
        assert probe(*RAW, "--json").json()["decisions"][0]["logp"] == wanted


class TestMany:
    def test_a_batch_and_what_was_recorded_of_it(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        kept = str(tmp_path / "p.jsonl")
        live = probe("--batch", batch(tmp_path), "--record", kept)
        shown = probe("--from", kept)
        assert shown.opened == []
        assert live.out == shown.out
        assert live.out.count("stays from layer") == 3
        assert "agrees, of 3" in live.out
        assert "hottest 25 %" in live.out
        assert "What an expert cache would have served" in live.out
        found = probe("--from", kept, "--json").json()
        assert found["agreement"]["n_decisions"] == found["agreement"]["n_agree"][-1] == 3
        assert found["hit_rates"]["fixed"][-1] == 1

    def test_refused_lines_are_told_and_the_others_shown(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        lines = ('{"prefix":"x","choices":["a","a"]}', "no json")
        seen = probe("--batch", batch(tmp_path, *lines), "--json", code=2)
        assert [refused["line"] for refused in seen.json()["refused"]] == [4, 5]
        assert "bmoe probe: line 4: choices[0] 'a' and choices[1] 'a' both begin" in seen.err
        assert len(seen.json()["decisions"]) == 3

    def test_nothing_is_restored_unless_asked_for(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        fields = {"prefix": "a prefix that two requests share", "choices": ["a", "b"]}
        (tmp_path / "r.jsonl").write_text("".join(json.dumps({**fields, "suffix": end}) + "\n" for end in ("x", "y")))
        for flags, reuses in (((), False), (("--prefix-cache", "on"), True)):
            value = probe("--batch", str(tmp_path / "r.jsonl"), "--json", *flags).json()
            assert [one["n_reused"] > 0 for one in value["decisions"]] == [False, reuses]

    def test_pictures(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        seen = probe("--batch", batch(tmp_path), "--png", str(tmp_path / "a"), "--svg", str(tmp_path / "b"))
        names = ["agreement", "experts", "hits", "lens-1", "lens-2", "lens-3"]
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"{name}.png" for name in names]
        assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [f"{name}.svg" for name in names]
        assert "12 pictures drawn" in seen.err

    def test_of_many_decisions_only_the_first_have_a_lens_drawn(
        self, probe: Callable[..., Real], tmp_path: Path
    ) -> None:
        with ProbeFile(tmp_path / "p.jsonl") as file:
            for seed in range(14):
                file.write(random_record(seed, n_layer=3, n_expert=0))
        seen = probe("--from", str(tmp_path / "p.jsonl"), "--svg", str(tmp_path / "a"))
        assert "13 pictures drawn; the lens of the first 12 decisions only" in seen.err

    def test_a_file_without_decisions(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").touch()
        seen = probe("--from", str(tmp_path / "p.jsonl"))
        assert (seen.out, seen.err) == ("", "no decisions to show\n")


class TestView:
    def text(self, *records: Any, options: Any = None, ascii_only: bool = False, width: int = 80) -> str:
        from rich.console import Console

        console = Console(width=width, highlight=False)
        with console.capture() as captured:
            for one in records:
                console.print(strip(one, course(one), "1", options, ascii_only=ascii_only, width=width))
        return captured.get()

    def test_a_strip(self) -> None:
        lines = self.text(record([[3, 1], [0, 4], [4, 0], [8, 0]])).splitlines()
        assert lines[0] == "1  A  60.7 %; stays from layer 2 of 4"
        assert lines[1].split() == ["layer", "0"]
        assert lines[2] == "  answer ABAA"
        assert lines[3] == "  share  ████"
        assert lines[4] == "  margin ▃.▅█"

    def test_many_layers_go_on_below_with_their_numbers(self) -> None:
        lines = self.text(random_record(n_layer=94)).splitlines()
        rulers = [line for line in lines if line.startswith("  layer")]
        assert [ruler[9:].split() for ruler in rulers] == [
            ["0", "10", "20", "30", "40", "50", "60"],
            ["70", "80", "90"],
        ]
        assert rulers[1].index("70") == 9 + 70 - 64
        assert [len(line) - 9 for line in lines if line.startswith("  share")] == [64, 30]
        assert max(map(len, lines)) <= 80

    def test_a_narrow_terminal_has_fewer_in_a_line(self) -> None:
        lines = self.text(random_record(n_layer=30), width=35).splitlines()
        assert [len(line) - 9 for line in lines if line.startswith("  answer")] == [26, 4]

    def test_many_choices_have_a_letter_each_and_a_legend(self) -> None:
        made = random_record(n_choices=70, choices=tuple(f"choice {index}" for index in range(70)), best=69)
        text = self.text(made)
        assert "A choice 0, B choice 1" in text
        assert text.splitlines()[0].startswith("1  choice 69")
        answers = next(line for line in text.splitlines() if line.startswith("  answer"))
        assert answers[-1] == "+"

    def test_ascii_and_what_is_no_text(self) -> None:
        text = self.text(record([[1, 0], [2, 0]], choices=("\x1b[31m", " Rome")), ascii_only=True)
        assert text.isascii()
        assert "\x1b" not in text
        assert "' Rome'" in text

    def test_without_a_lens_it_says_why(self) -> None:
        assert "no lens: none was made" in self.text(record())


class TestUsage:
    @pytest.mark.parametrize(
        ("argv", "why"),
        [
            ((), "give a question with --option"),
            ((*QUESTION, "--batch", "x"), "three ways to ask: give one"),
            (("--batch", "x", "--from", "y"), "three ways to ask: give one"),
            (("--from", "y", "--record", "z"), "--record does nothing with --from"),
            (("--batch", "/nowhere"), "--batch: cannot read /nowhere: No such file"),
            (("--from", "/nowhere"), "--from: cannot read /nowhere: No such file"),
            ((*RAW, "--record", "/nowhere/p"), "--record: cannot write /nowhere/p"),
            ((*RAW, "--no-template", "--system", "x"), "--no-template leaves nothing"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_opened(
        self, probe: Callable[..., Real], argv: tuple[str, ...], why: str
    ) -> None:
        seen = probe(*argv, code=2)
        assert why in seen.err
        assert seen.opened == []

    def test_what_is_no_record_is_refused(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text("seq,id\n")
        seen = probe("--from", str(tmp_path / "p.jsonl"), "--json", code=2)
        assert "line 1 of" in seen.json()["error"]

    def test_help_fits_80_columns(self, bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert bmoe("probe", "--help") == 0
        assert [line for line in bmoe.out.splitlines() if len(line) > 80] == []
        assert "--from probe.jsonl --png pictures" in bmoe.out


class TestDecideProbe:
    def test_of_decide(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        kept = tmp_path / "p.jsonl"
        wanted = probe(*RAW, "--json", command="decide").json()["choice_logp"]
        for _ in range(2):
            found = probe(*RAW, "--json", "--decide-probe", str(kept), command="decide").json()["choice_logp"]
            assert found == wanted
        assert [[one.seq, list(one.logp)] for one in read(kept)] == [[1, wanted]] * 2
        out = str(tmp_path / "out.jsonl")
        probe("--batch", batch(tmp_path), "--out", out, "--decide-probe", str(kept), command="decide")
        assert [one.seq for one in read(kept)] == [1, 1, 1, 2, 3]

    def test_anothers_file_is_refused(self, probe: Callable[..., Real], tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine\n")
        seen = probe(*RAW, "--decide-probe", str(tmp_path / "notes.txt"), command="decide", code=2)
        assert "holds something else" in seen.err
        assert (seen.opened, (tmp_path / "notes.txt").read_text()) == ([], "mine\n")

    @pytest.mark.parametrize("command", [SESSION, (*ORIGINAL, "--session")])
    def test_of_a_session_is_numbered_as_its_other_traces(
        self, command: tuple[str, ...], models: dict[str, Path], tmp_path: Path
    ) -> None:
        requests = [decide(1), decide(2, choices=["A", "A"]), decide(3, suffix="four")]
        done = ask_session(command, models, tmp_path, "--decide", "--csv", str(tmp_path / "c.csv"), requests=requests)
        decided = [record for tag, record in answers(done.stdout) if tag == "DECIDE"]
        found = list(read(tmp_path / "p.jsonl"))
        assert [one.seq for one in found] == [1, 3]
        assert [list(one.logp) for one in found] == [one["choice_logp"] for one in decided]
        assert [(one.n_reused, one.n_prefilled) for one in found] == [
            (one["n_reused"], one["n_prefilled"]) for one in decided
        ]
        assert found[1].n_reused > 0
        rows = (tmp_path / "c.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == ["1", "3"]

    def test_without_decisions_it_is_said(self, models: dict[str, Path], tmp_path: Path) -> None:
        done = ask_session(SESSION, models, tmp_path, requests=[decide(1)])
        assert "bmoe session: --decide-probe does nothing without --decide" in done.stderr.decode()
        assert list(read(tmp_path / "p.jsonl")) == []


def ask_session(
    command: tuple[str, ...], models: dict[str, Path], tmp_path: Path, *flags: str, requests: list[dict[str, Any]]
) -> "subprocess.CompletedProcess[bytes]":
    common = ("-m", str(models["deepseek2"]), "-t", "1", "-c", "512", "--decide-probe", str(tmp_path / "p.jsonl"))
    done = run(*command, *common, *flags, data="\n".join(map(json.dumps, requests)).encode())
    assert done.returncode == 0, done.stderr
    return done
