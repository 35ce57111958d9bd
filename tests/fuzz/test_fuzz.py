"""A short run over each target, as `make fuzz` does it at length, and who is blamed for an end."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.run import TARGETS, fuzz, whose, write_corpus

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20


@pytest.fixture(scope="module")
def program() -> Path:
    if os.environ.get("BMOE_TEST_BUILD"):
        pytest.skip("another build is being tested")
    done = subprocess.run(["make", "-C", ROOT, "fuzz-program"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "fuzz" / "fuzz" / "fuzz"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_corpus(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_mutated_does_not_end_the_process_in_our_code(program: Path, corpus: Path, target: str) -> None:
    outcome = fuzz(program, corpus, target, SECONDS, seed=1)
    assert outcome.ours == []
    assert outcome.tried > 50 and outcome.taken > 0


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (
            "    #0 0x1 in abort (libc.so.6+0x1)\n    #1 0x2 in bmoe::Engine::x(int) a.cpp:3",
            (True, "bmoe::Engine::x(int)"),
        ),
        (
            "    #0 0x1 in abort (libc.so.6+0x1)\n    #1 0x2 in ggml_abort (fuzz+0x2)\n    #2 0x3 in bmoe_open a.cpp:3",
            (False, "ggml_abort"),
        ),
        ("    #0 0x1 in llama_vocab::impl::load(int) (fuzz+0x2)", (False, "llama_vocab::impl::load")),
    ],
)
def test_who_ended_it(stack: str, expected: tuple[bool, str]) -> None:
    assert whose(stack) == expected


def test_an_end_without_a_stack_is_ours() -> None:
    assert whose("killed")[0]
