"""Mutated models, texts and states for a bounded time: run.py PROGRAM FOLDER SECONDS [TARGET...]

What ends the process inside llama.cpp is counted, as docs/c-api.md says that files can; what ends it in our code is
kept in FOLDER and fails the run. ASan tells which it was by the stack.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bmoe_native import Engine
from tests import tiny

TARGETS = ("open", "text", "state")
OURS = re.compile(r"^(bmoe::|bmoe_|\(anonymous namespace\)::)")
THEIRS = re.compile(r"^(llama_|llama::|llm_|ggml_|gguf_|common_|jinja::|unicode_|clip_)|llama_|gguf_|ggml_")
TEXTS = ("hello", "<|im_start|>system\nbe good<|im_end|>", "naïve 漢字 👍", "a\0b", " \n\t ", "1234 " * 40, "\xff\xfe")


@dataclass
class Outcome:
    """Of one target: inputs tried in the runs that came to their end, what llama.cpp ended, and what we did."""

    tried: int = 0
    taken: int = 0
    theirs: dict[str, int] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)


def write_corpus(folder: Path) -> Path:
    """Seeds for each target, and the model that texts and states are for."""
    for target in TARGETS:
        (folder / target).mkdir(parents=True, exist_ok=True)
    for arch in ("llama", "qwen3moe", *(name for name in tiny.FAMILIES if "gpt-oss" in name or "lfm2" in name)):
        if arch in tiny.FAMILIES and not tiny.FAMILIES[arch].tensors_per_shard:
            tiny.write(folder / "open" / f"{arch}.gguf", arch=arch)
    for n, text in enumerate(TEXTS):
        (folder / "text" / str(n)).write_bytes(text.encode("utf-8", "surrogateescape"))
    model = tiny.write(folder / "model.gguf")
    with Engine.open(model, n_ctx=64, n_ubatch=16) as engine:
        for n_tokens in (0, 1, 20, 63):
            engine.drop_state()
            if n_tokens:
                engine.prefill([1 + n % 100 for n in range(n_tokens)])
            (folder / "state" / str(n_tokens)).write_bytes(engine.save_state())
    return model


def whose(said: str) -> tuple[bool, str]:
    """Whether it is ours, and the function in which the process ended: the first on the stack that has an owner."""
    for function in re.findall(
        r"^ +#\d+ 0x[0-9a-f]+ in (.*?)(?: \S+:\d+(?::\d+)?| \(\S+\+0x[0-9a-f]+\).*)?$", said, re.MULTILINE
    ):
        if OURS.match(function):
            return True, function
        if THEIRS.search(function):
            return False, function.partition("(")[0]
    return True, "no stack:\n" + said[-2000:]


def fuzz(program: Path, folder: Path, target: str, seconds: float, seed: int) -> Outcome:
    model, outcome, until = folder / "model.gguf", Outcome(), time.monotonic() + seconds
    work = folder / f"work-{target}"
    work.mkdir(exist_ok=True)
    options = "handle_abort=1:exitcode=77:allocator_may_return_null=1:detect_leaks=0:max_allocation_size_mb=4096"
    env = {**os.environ, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    while (left := int(until - time.monotonic())) > 0:
        command = [str(program), str(model), target, str(folder / target), str(left), str(seed)]
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, timeout=seconds + 120, check=False)
        seed += 1
        said = done.stderr.decode("utf-8", "replace")
        if done.returncode == 0:
            tried, taken = re.findall(rb"\d+", done.stdout)
            outcome.tried += int(tried)
            outcome.taken += int(taken)
            continue
        is_ours, where = whose(said)
        if is_ours:
            kept = folder / f"crash-{target}-{seed - 1}"
            (work / "input").rename(kept)
            outcome.ours.append(f"{kept}: {where}\n{said[-3000:]}")
            break
        outcome.theirs[where] = outcome.theirs.get(where, 0) + 1
    return outcome


def main(arguments: list[str]) -> int:
    program, folder, seconds, *targets = arguments
    root = Path(folder).absolute()
    write_corpus(root)
    failed = False
    for target in targets or TARGETS:
        outcome = fuzz(Path(program).absolute(), root, target, float(seconds), int(time.time()))
        print(f"{target}: {outcome.tried} tried, {outcome.taken} taken; by llama.cpp: {outcome.theirs}")
        print("\n".join(outcome.ours), end="")
        failed |= bool(outcome.ours)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
