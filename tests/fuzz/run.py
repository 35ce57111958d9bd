"""Mutated inputs for a bounded time: run.py PROGRAMS FOLDER SECONDS [TARGET...]

libFuzzer drives all targets, the probe's by way of atheris. What ends the process inside llama.cpp is counted, as
docs/c-api.md says that files can; what ends it in our code fails the run. The stack tells which it was. Inputs that did
either are kept in FOLDER, and so is the corpus, from which the next run goes on.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import seeds

ROOT = Path(__file__).resolve().parents[2]
TARGETS = tuple(seeds.WRITERS)
LONGEST_INPUT = {"open": 1 << 16, "text": 4096, "state": 1 << 16, "probe": 4096}
SECONDS_OF_AN_INPUT = 60
OURS = re.compile(r"^(bmoe::|bmoe_|fuzz::|LLVMFuzzer|\(anonymous namespace\)::)")
THEIRS = re.compile(r"^(llama_|llama::|llm_|ggml_|gguf_|common_|jinja::|unicode_|clip_)|llama_|gguf_|ggml_")


@dataclass
class Outcome:
    """Of one target: inputs tried, edges of our code that they reach, what llama.cpp ended, and what we did."""

    tried: int = 0
    edges: int = 0
    features: int = 0
    corpus: int = 0
    theirs: dict[str, int] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)


def whose(said: str) -> tuple[bool, str]:
    """Whether it is ours, and the function in which the process ended: the first on the stack that has an owner."""
    for function in re.findall(
        r"^ +#\d+ 0x[0-9a-f]+ in (.*?)(?: \S+:\d+(?::\d+)?| \(\S+\+0x[0-9a-f]+\).*)?$", said, re.MULTILINE
    ):
        if OURS.match(function):
            return True, function
        if THEIRS.search(function):
            return False, function.partition("(")[0]
    if "SUMMARY: AddressSanitizer: out-of-memory" in said:
        return False, "a huge allocation"  # of which ASan makes an end, and others std::bad_alloc
    return True, "no stack:\n" + said[-2000:]


def command_of(programs: Path, target: str) -> list[str]:
    if target == "probe":
        return [sys.executable, str(ROOT / "tests" / "fuzz" / "probe.py")]
    return [str(programs / f"fuzz-{target}")]


def count(outcome: Outcome, said: str) -> None:
    """Add what a run says of itself as it goes."""
    if runs := re.findall(r"^#(\d+)\s", said, re.MULTILINE):
        outcome.tried += int(runs[-1])
    if stats := re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said):
        outcome.edges, outcome.features, outcome.corpus = map(int, stats[-1])


def fuzz(programs: Path, folder: Path, target: str, seconds: float, seed: int) -> Outcome:
    outcome, until = Outcome(), time.monotonic() + seconds
    corpus, models, ends = folder / target, folder / f"models-{target}", folder / f"ends-{target}"
    seeds.write(target, corpus, models)
    work = folder / f"work-{target}"
    for made in (work, ends):
        made.mkdir(exist_ok=True)
    options = "handle_abort=1:allocator_may_return_null=1:detect_leaks=0:max_allocation_size_mb=4096"
    env = {
        **os.environ,
        "BMOE_FUZZ_MODELS": str(models),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    while (left := int(until - time.monotonic())) > 0:
        command = [
            *command_of(programs, target),
            f"-max_total_time={left}",
            f"-seed={seed}",
            f"-max_len={LONGEST_INPUT[target]}",
            f"-timeout={SECONDS_OF_AN_INPUT}",
            "-rss_limit_mb=4096",
            f"-artifact_prefix={ends}/",
            str(corpus),
        ]
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, timeout=seconds + 120, check=False)
        seed += 1
        said = done.stderr.decode("utf-8", "replace")
        count(outcome, said)
        if done.returncode == 0:
            continue
        is_ours, where = (True, "Python") if target == "probe" else whose(said)
        if is_ours:
            outcome.ours.append(f"{where}\n{said[-6000:]}")
            break
        outcome.theirs[where] = outcome.theirs.get(where, 0) + 1
    return outcome


def main(arguments: list[str]) -> int:
    programs, folder, seconds, *targets = arguments
    failed = False
    for target in targets or TARGETS:
        outcome = fuzz(Path(programs).absolute(), Path(folder).absolute(), target, float(seconds), int(time.time()))
        print(
            f"{target}: {outcome.tried} tried; {outcome.edges} edges, {outcome.features} features, "
            f"{outcome.corpus} inputs; ended by llama.cpp: {outcome.theirs}"
        )
        print("\n".join(outcome.ours), end="")
        failed |= bool(outcome.ours)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
