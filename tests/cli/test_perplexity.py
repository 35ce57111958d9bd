import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bmoe import Session
from bmoe.decide.backend import Float32Array
from bmoe.decide.perplexity import PerplexityRequest
from tests.cli.conftest import Terminal
from tests.decide.scripted import N_VOCAB, Pieces, ScriptedBackend
from tests.fakes import ScriptedEngine

TEXT = "one two three four five six seven eight nine ten"
SCORE = ("perplexity", "-m", "x.gguf")
WAIT_S = 120  # only a hang is to end by it


def scored(text: str = TEXT, **fields: object) -> object:
    return Session(ScriptedEngine()).perplexity(PerplexityRequest(text=text, **fields))  # type: ignore[arg-type]


def never(word: str) -> Callable[[Pieces], Float32Array]:
    """Logits that give a word no mass and any other the same."""
    row = np.zeros(N_VOCAB, np.float32)
    row[ScriptedBackend().text_tokens(word, add_bos=False)[0]] = -math.inf
    return lambda pieces: row


class TestResult:
    def test_json_is_the_result(self, bmoe: Terminal) -> None:
        assert bmoe(*SCORE, "--text", TEXT, "--window", "6", "--stride", "2", "--json", "--tokens") == 0
        whole = scored(window=6, stride=2)
        record = bmoe.json()
        assert record["token_logp"] == list(whole.token_logp)
        for name in ("perplexity", "nll", "stderr", "n_tokens", "n_prefilled", "prefill_s", "cancelled"):
            assert record[name] == getattr(whole, name)
        assert (record["model"], record["n_scored"]) == ("x.gguf", 9)
        assert scored().token_logp != whole.token_logp

    def test_tokens_are_left_out_unless_asked_for(self, bmoe: Terminal) -> None:
        assert bmoe(*SCORE, "--text", TEXT, "--json") == 0
        assert "token_logp" not in bmoe.json()

    def test_for_people(self, bmoe: Terminal) -> None:
        assert bmoe(*SCORE, "--text", TEXT, "--choice", " A", "--choice", "B") == 0
        whole = scored(choices=(" A", "B"))
        lines = [" ".join(line.split()) for line in bmoe.out.splitlines()]
        error = whole.perplexity * whole.stderr
        assert lines[0] == f"perplexity {whole.perplexity:.4f} ± {error:.4f}"
        assert lines[1] == f"nll per token {whole.nll:.4f} ± {whole.stderr:.4f} nats"
        assert lines[2] == "tokens scored 9"
        assert lines[4].startswith(f"{whole.choice_logp[0]:.4f}")
        assert lines[4].endswith("' A'")
        assert bmoe.err == ""

    def test_a_token_without_mass_is_null(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(logits=never(" three"))
        assert bmoe(*SCORE, "--text", TEXT, "--json", "--tokens", "--choice", " three", "--choice", "A") == 0
        record = bmoe.json()
        assert [index for index, logp in enumerate(record["token_logp"]) if logp is None] == [1]
        assert (record["perplexity"], record["nll"], record["stderr"]) == (None, None, None)
        assert record["choice_logp"][0] is None
        assert record["choice_logp"][1] == pytest.approx(-math.log(N_VOCAB - 1))
        assert bmoe(*SCORE, "--text", TEXT, "--choice", " three") == 0
        assert "perplexity     inf" in bmoe.out


class TestText:
    @pytest.mark.parametrize("how", ["file", "stdin"])
    def test_a_file_and_stdin_are_scored_byte_for_byte(
        self, bmoe: Terminal, tmp_path: Path, typed: Callable[[bytes], None], how: str
    ) -> None:
        data = "né  zwei\r\ndrei\n".encode()
        (tmp_path / "t.txt").write_bytes(data)
        typed(data)
        argument = "-" if how == "stdin" else str(tmp_path / "t.txt")
        assert bmoe(*SCORE, argument, "--json", "--tokens") == 0
        assert bmoe.json()["token_logp"] == list(scored(data.decode()).token_logp)

    @pytest.mark.parametrize(
        ("argv", "why"),
        [
            ((), "give a FILE, - for stdin, or --text"),
            (("x.txt", "--text", "y"), "give a FILE, - for stdin, or --text"),
            (("/nowhere.txt",), "FILE: cannot read '/nowhere.txt'"),
            (("--text", "x y", "--tokens"), "--tokens does nothing without --json"),
            (("--text", "x y", "--window", "-1"), "'--window'"),
        ],
    )
    def test_what_is_wrong_is_said_before_anything_is_opened(
        self, bmoe: Terminal, argv: tuple[str, ...], why: str
    ) -> None:
        assert bmoe(*SCORE, *argv) == 2
        assert why in bmoe.err
        assert bmoe.opened == []

    @pytest.mark.parametrize(
        ("argv", "why"),
        [
            (("--text", "one"), "the text is 1 tokens"),
            (("--text", TEXT, "--window", "5000"), "window is 5000, allowed are 2 to the context's 4096"),
            (("--text", TEXT, "--window", "4", "--stride", "4"), "stride is 4 and must be less"),
        ],
    )
    def test_what_the_model_refuses_is_2(self, bmoe: Terminal, argv: tuple[str, ...], why: str) -> None:
        assert bmoe(*SCORE, *argv) == 2
        assert why in bmoe.err

    def test_a_broken_disk_is_1(self, bmoe: Terminal) -> None:
        bmoe.engine = ScriptedEngine(fail_at=0)
        assert bmoe(*SCORE, "--text", TEXT) == 1


class TestCtrlC:
    """The third window is scored while it is pressed: six tokens of two windows, and what is left of the third."""

    FLAGS = ("--window", "4", "--stride", "2")

    def press(self, bmoe: Terminal, at: int) -> None:
        engine = bmoe.engine

        def press() -> None:
            if engine.n_prefills == at + 1:
                signal.raise_signal(signal.SIGINT)
                assert engine.cancelled.wait(WAIT_S)

        engine.during_prefill = press

    def test_the_estimate_so_far_is_shown(self, bmoe: Terminal) -> None:
        self.press(bmoe, at=2)
        assert bmoe(*SCORE, "--text", TEXT, *self.FLAGS) == 130
        so_far = scored(window=4, stride=2).token_logp[:5]
        assert f"{math.exp(-sum(so_far) / 5):.4f}" in bmoe.out
        assert "tokens scored  5 of 9, interrupted" in bmoe.out
        assert bmoe.err == "bmoe: interrupted\n"

    def test_json_is_one_object_with_it(self, bmoe: Terminal) -> None:
        self.press(bmoe, at=2)
        assert bmoe(*SCORE, "--text", TEXT, *self.FLAGS, "--json") == 130
        assert (bmoe.json()["cancelled"], bmoe.json()["n_scored"]) == (True, 5)

    def test_before_anything_was_scored_there_is_no_estimate(self, bmoe: Terminal) -> None:
        self.press(bmoe, at=0)
        assert bmoe(*SCORE, "--text", TEXT, "--choice", "A") == 130
        assert "tokens scored  0 of 9, interrupted" in bmoe.out
        assert "nan" not in bmoe.out


def test_progress_counts_the_tokens(bmoe: Terminal) -> None:
    bmoe.is_terminal = True
    bmoe.environ["TERM"] = "xterm"
    assert bmoe(*SCORE, "--text", TEXT) == 0
    assert "9/9" in bmoe.err


def test_help_is_0_and_teaches_within_80_columns(bmoe: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert bmoe("perplexity", "--help") == 0
    for word in ("--window 512 --stride 256", "130 interrupted", "bmoe perplexity -", "exp of the mean"):
        assert word in bmoe.out
    assert [line for line in bmoe.out.splitlines() if len(line) > 80] == []
    assert "[[" not in bmoe.out


def test_a_choice_has_the_bits_of_a_decision(endless: Path) -> None:
    common = ("-m", str(endless), "-c", "256", "-t", "1", "--json", "--choice", "a", "--choice", "b")

    def run(*argv: str) -> list[float]:
        done = subprocess.run(
            [sys.executable, "-m", "bmoe.cli", *argv, *common],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=WAIT_S,
            check=True,
        )
        logps: list[float] = json.loads(done.stdout)["choice_logp"]
        return logps

    text = "the thin man on the hill and the other one in the van"
    after = run("perplexity", "--text", text, "--window", "8")
    assert after == run("decide", "--no-template", "--prefix-cache", "off", "--prefix", text)
    assert after != run("perplexity", "--text", f"{text}s", "--window", "8")
