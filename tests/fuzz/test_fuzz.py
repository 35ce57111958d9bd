"""A short run over each target, as `make fuzz` does it at length, and who is blamed for an end."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.run import TARGETS, fuzz, whose

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 15
LEAST_EDGES = {"open": 3000, "text": 1000, "state": 400, "probe": 250}  # what the seeds alone reach, or nearly


@pytest.fixture(scope="module")
def programs() -> Path:
    if os.environ.get("BMOE_TEST_BUILD"):
        pytest.skip("another build is being tested")
    if shutil.which("clang++") is None:
        pytest.skip("libFuzzer comes with clang")
    done = subprocess.run(["make", "-C", ROOT, "fuzz-programs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "fuzz" / "fuzz"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_mutated_does_not_end_the_process_in_our_code(programs: Path, tmp_path: Path, target: str) -> None:
    if target == "probe" and importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no wheel for this Python")
    outcome = fuzz(programs, tmp_path, target, SECONDS, seed=1)
    assert outcome.ours == []
    assert outcome.tried > 50 and outcome.edges > LEAST_EDGES[target]


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
        (
            "    #0 0x1 in operator new(unsigned long) (fuzz+0x1)\nSUMMARY: AddressSanitizer: out-of-memory (fuzz+0x1)",
            (False, "a huge allocation"),
        ),
    ],
)
def test_who_ended_it(stack: str, expected: tuple[bool, str]) -> None:
    assert whose(stack) == expected


def test_an_end_without_a_stack_is_ours() -> None:
    assert whose("killed")[0]
