"""Memory that runs out at one allocation of a call: a status and a text, in our own code never the process's end."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import tiny
from tests.csrc.test_csrc import programs  # noqa: F401  # the fixture

MOST = 30  # allocations that are failed of one call, spread over it, beside the first and last ones
EDGE = 12
CALLS = ["open", "render", "tokenize", "detokenize", "prefill", "sample", "save", "load", "close"]
CLEAN = {
    0,
    -7,
    -8,
    -9,
    -10,
    -12,
}  # OK, MEMORY; MODEL, TEMPLATE, STATE, INTERNAL where llama.cpp or its Jinja says no more
BROKEN = -12


def output(program: Path, *arguments: object) -> str:
    words = [str(program), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout


def chosen(n_allocations: int) -> list[int]:
    spread = range(1, n_allocations + 1, max(1, n_allocations // MOST))
    edges = [*range(1, EDGE), *range(n_allocations - EDGE, n_allocations + 1)]
    return sorted({n for n in [*spread, *edges] if 1 <= n <= n_allocations})


def who_ended(program: Path, addresses: list[str]) -> list[str]:
    """The functions on the stack where the process ended, innermost first."""
    return output(Path("addr2line"), "-f", "-C", "-e", program, *addresses).splitlines()[::2]


def is_ours(functions: list[str]) -> bool:
    """Whether an exception that ends the process came to its end in our code, or what is called from there at once."""
    for name in functions:
        if re.match(r"(llama_|llm_|llama::|ggml_|gguf_|common_|jinja::|minja::)", name):
            return False
        if name.startswith(("bmoe::", "bmoe_", "(anonymous namespace)::report")):
            return True
    return True


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("memory")
    return {
        "resident": tiny.write(folder / "tiny.gguf"),
        "streamed": tiny.write(folder / "moe.gguf", arch="qwen3moe"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resident", "streamed"])
@pytest.mark.parametrize("call", CALLS)
def test_each_allocation_may_fail(programs: Path, models: dict[str, Path], how: str, call: str) -> None:  # noqa: F811
    program = programs / "tests" / "test_memory"
    n_allocations = int(output(program, models[how], how, call))
    numbers = chosen(n_allocations)
    lines = output(program, models[how], how, call, *numbers).splitlines()
    assert len(lines) == len(numbers) >= 3
    outcomes: Counter[int] = Counter()
    for line in lines:
        n, _, told = line.partition(" ")
        if told.startswith("signal"):
            functions = who_ended(program, told.split()[2:]) if len(told.split()) > 2 else []
            assert functions and not is_ours(functions), f"allocation {n} of {call}: {told}\n" + "\n".join(functions)
            outcomes[1] += 1
            continue
        answer = re.fullmatch(r"status (-?\d+), again (-?\d+)", told)
        assert answer, line
        status, again = int(answer[1]), int(answer[2])
        outcomes[status] += 1
        assert status in CLEAN, line
        assert again == (BROKEN if status == BROKEN and call != "open" else 0), line
    assert outcomes.keys() - {1}, "every one ended the process"
