"""A model that is larger than the memory there is: the same bits, within the memory it was given."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import make_moe
from bmoe_native import Engine
from tests.gates.cgroup import limited, run_in

MIB = 2**20
LIMIT = 224 * MIB
SHAPE = ["--layers", "12", "--experts", "64", "--used", "4", "--embd", "512", "--ffn", "512", "--heads", "4"]
PROMPTS = ["--kv-heads", "2", "--topics", "2", "--prompt-count", "1", "--prompt-tokens", "60"]
DECIDE = """
    import hashlib, json, sys
    from pathlib import Path
    from bmoe.bench.memory import AnonymousPeak, BufferLog, anonymous_bytes
    from bmoe_native import Engine, Streaming
    model, prompt, budget, dense = sys.argv[1:]
    streaming = None if budget == "-" else Streaming(cache_bytes=int(budget), dense=dense)
    log = BufferLog()
    before = anonymous_bytes()
    options = {"n_ctx": 128, "n_threads": 2, "repack": False, "on_log": log, "log_level": 2}
    with Engine.open(model, streaming=streaming, **options) as engine:
        unmapped = engine.info.weights_bytes - engine.info.streamed_bytes if dense == "anon" else 0
        tokens = engine.text_tokens(Path(prompt).read_text(), add_bos=True)
        with AnonymousPeak() as peak:
            for _ in range(3):
                engine.drop_state()
                engine.prefill(tokens)
        bits = hashlib.sha256(engine.logits().tobytes()).hexdigest()
        bound = log.bound(engine.info.cache_bytes, unmapped)
        layer = engine.info.streamed_bytes // max(engine.info.n_moe_layer, 1)
    print(json.dumps({"bits": bits, "peak": peak.n_bytes - before, "bound": bound.n_bytes, "layer": layer,
                      "cache": engine.info.cache_bytes}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, named_models: list[Path]) -> Path:
    path = tmp_path_factory.mktemp("larger")
    tokenizer = next(str(model) for model in named_models if "smollm2" in model.name)
    make_moe.main([str(path / "m.gguf"), *SHAPE, *PROMPTS, "--tokenizer", tokenizer, "--prompts", str(path)])
    return path


def command(folder: Path, budget: str, dense: str = "mmap") -> list[str | Path]:
    prompt = next(iter(sorted(folder.glob("p60-0-*.txt"))))
    return [sys.executable, "-c", textwrap.dedent(DECIDE), folder / "m.gguf", prompt, budget, dense]


@pytest.mark.model
def test_a_model_larger_than_memory_answers_with_the_resident_bits(folder: Path) -> None:
    with limited(8 << 30) as group:
        resident = run_in(group, command(folder, "-"))
    assert resident.returncode == 0, resident.stderr
    wanted = json.loads(resident.stdout)["bits"]
    assert (folder / "m.gguf").stat().st_size > 1.3 * LIMIT
    with limited(LIMIT) as group:
        for budget, dense in (("-1", "mmap"), ("0", "anon"), (str(40 * MIB), "mmap")):
            done = run_in(group, command(folder, budget, dense))
            assert done.returncode == 0, (budget, done.returncode, done.stderr)
            said = json.loads(done.stdout)
            assert said["bits"] == wanted
            assert said["cache"] < LIMIT


@pytest.mark.model
@pytest.mark.parametrize("dense", ["mmap", "anon"])
@pytest.mark.parametrize("budget", [0, 32 * MIB, 128 * MIB])
def test_anonymous_memory_stays_within_what_was_given(folder: Path, budget: int, dense: str) -> None:
    """Dense weights, buffers, the budget; beside them the layer that is computed, and part of the one that is read."""
    with limited(8 << 30) as group:
        done = run_in(group, command(folder, str(budget), dense))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["peak"] <= 1.1 * (said["bound"] + 1.25 * said["layer"]), said
    assert said["peak"] >= 0.5 * budget, said


@pytest.mark.model
def test_a_budget_that_is_not_there_is_said(folder: Path) -> None:
    program = """
        import sys
        from bmoe_native import Engine, Streaming
        said = []
        streaming = Streaming(cache_bytes=250 << 20)
        Engine.open(sys.argv[1], n_ctx=128, streaming=streaming, on_log=lambda _, text: said.append(text)).close()
        print("\\n".join(said))
    """
    with limited(LIMIT) as group:
        done = run_in(group, [sys.executable, "-c", textwrap.dedent(program), folder / "m.gguf"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a cache of 250 MiB is asked for, and there is room for ")
    with Engine.open(folder / "m.gguf", inspect=True) as engine:
        assert engine.info.experts_bytes > 250 * MIB
