"""A device with kernels of its own computes nearly what the CPU does: `make vulkan`, on the device BMOE_TEST_DEVICE."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bmoe import Session, models
from bmoe.decide.perplexity import PerplexityRequest
from bmoe_native import Engine, Streaming, devices
from tests import tiny
from tests.device.test_types import with_matrices_in
from tests.tiny.family import N_EXPERT

DEVICE = os.environ["BMOE_TEST_DEVICE"]
CACHE = Path(os.environ.get("BMOE_CACHE") or models.default_cache())
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 200)]
STREAMED = [name for name, family in tiny.FAMILIES.items() if family.metadata.get("expert_count")]
# Wide pieces, a narrow end, a prompt again after its state was dropped.
PROMPTS = ((0, 64), (64, 150), (150, 155), (0, 96))
WIDE = ((0, 64), (64, 128))
Prompts = tuple[tuple[int, int], ...]

# Short, and without a template: a driver in software computes half a token in a second.
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Capital of France?", ("Rome", "Paris")),
    ("Capital of Japan?", ("Tokyo", "Seoul")),
    ("Capital of Italy?", ("Rome", "Madrid", "Berlin")),
    ("2 + 2?", ("3", "4", "5")),
    ("7 * 8?", ("54", "56")),
    ("A fruit?", ("apple", "bread")),
    ("A programming language?", ("Banana", "Python")),
    ("The largest planet?", ("Mars", "Jupiter", "Venus")),
    ("Which can fly?", ("eagle", "horse", "whale")),
    ("Colour of the sky?", ("green", "blue")),
    ("Opposite of hot?", ("cold", "dry")),
    ("I was charged twice.", ("billing", "sales")),
    ("The app crashes.", ("sales", "support")),
    ("Connect to a network.", ("Wi-Fi", "Display")),
    ("Make the screen darker.", ("Wi-Fi", "Display")),
    ("The food was cold and late.", ("good", "bad")),
    ("I would come again any day.", ("good", "bad")),
    ("Defines a function in Python?", ("def", "func")),
    ("len([1, 2, 3])?", ("2", "3")),
    ("Ice is", ("frozen", "boiling")),
)
TEXT = (Path(__file__).parent / "lighthouse.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def exact(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Matrices of F32 alone: what the CPU multiplies others with it rounds to 8 bits, and a router chooses anew."""
    whole = tmp_path_factory.mktemp("exact") / "gpt-oss.gguf"
    return {**paths, "gpt-oss": with_matrices_in(paths["gpt-oss"], whole, gguf.GGMLQuantizationType.F32)}


def logits(
    path: Path, device: str = "", streaming: Streaming | None = None, *, prompts: Prompts = PROMPTS, used: int = 0
) -> list[Any]:
    with Engine.open(
        path, n_ubatch=64, repack=False, prefill_device=device, streaming=streaming, n_expert_used=used
    ) as engine:
        assert engine.info.prefill_device == device, engine.info.prefill_device_why
        rows = []
        for begin, end in prompts:
            if begin == 0:
                engine.drop_state()
            engine.prefill(TOKENS[begin:end])
            rows.append(engine.logits())
        assert bool(engine.counters().dev_tokens) == bool(device)
        return rows


def assert_near(got: list[Any], wanted: list[Any]) -> None:
    """Closer than a wrong weight or state would let it be: logits of these models spread over several units."""
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=0.05 * float(np.std(theirs)))


def test_the_device_is_one_of_the_list() -> None:
    assert [device.type for device in devices() if device.name == DEVICE] in (["gpu"], ["igpu"]), devices()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_computes_there(family: str, exact: dict[str, Path]) -> None:
    assert_near(logits(exact[family], DEVICE), logits(exact[family]))


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("family", STREAMED)
def test_streamed_experts_go_there(family: str, cached: int, exact: dict[str, Path]) -> None:
    with Engine.open(exact[family], inspect=True) as engine:
        streaming = Streaming(cache_bytes=engine.info.experts_bytes * cached // 4)
    assert_near(logits(exact[family], DEVICE, streaming), logits(exact[family]))


def test_what_the_device_computes_with_lies_there(paths: dict[str, Path]) -> None:
    """It puts nodes into another order, by which a weight is not to be taken for one that is read elsewhere."""
    tensors = gguf.GGUFReader(paths["mamba"]).tensors
    matrices = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
    layer = sum(int(t.n_bytes) for t in tensors if t.name in [f"blk.0.{name}.weight" for name in matrices])
    with Engine.open(paths["mamba"], n_ubatch=64, prefill_device=DEVICE) as engine:
        assert 0 < 2 * layer <= engine.info.prefill_device_bytes


def test_weights_larger_than_the_device_puts_together_go_there() -> None:
    """Its limit is read once in a process."""
    test = f"{__file__}::{test_every_family_computes_there.__name__}[qwen3moe]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "GGML_VK_SUBALLOCATION_BLOCK_SIZE": "131072"}
    ran = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "MXFP4"])
def test_matrices_of_many_types_go_there(kind: str, streamed: bool, tmp_path: Path) -> None:
    whole = tiny.write(tmp_path / "f32.gguf", arch="qwen3moe", n_ctx_train=1024)
    path = with_matrices_in(whole, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    exact = with_matrices_in(path, tmp_path / "exact.gguf", gguf.GGMLQuantizationType.F32)
    streaming = Streaming(cache_bytes=0) if streamed else None
    # All experts, so that no choice of them hangs on a rounding; no narrow end, which the CPU would round.
    got = logits(path, DEVICE, streaming, prompts=WIDE, used=N_EXPERT)
    assert_near(got, logits(exact, prompts=WIDE, used=N_EXPERT))


Answers = tuple[list[Any], float]


def answers(model: str, device: str = "", *, repack: bool = False) -> Answers:
    """What it says to each question, as probabilities of its options; its perplexity over the text."""
    with Session.open(model, cache=CACHE, prefill_device=device, prefill_min_tokens=8, repack=repack) as session:
        assert session.info.prefill_device == device, session.info.prefill_device_why
        results = [
            session.decide(session.lettered(question, options, template=False)) for question, options in QUESTIONS
        ]
        assert all(result.prefill_dev_tokens == (result.n_prefilled if device else 0) for result in results)
        scored = session.perplexity(PerplexityRequest(text=TEXT))
        assert bool(scored.prefill_dev_tokens) == bool(device)
        return [np.exp(result.choice_logp) for result in results], math.exp(scored.nll)


def furthest(some: Answers, others: Answers) -> float:
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(some[0], others[0], strict=True))


@pytest.mark.model
def test_the_default_model_answers_as_on_the_cpu(tmp_path: Path) -> None:
    """What the CPU multiplies a quantized matrix with it rounds to 8 bits; with the same weights as F32 it does not."""
    name = models.DEFAULT.name
    path = models.path_of(models.DEFAULT, CACHE)
    exact = answers(str(with_matrices_in(path, tmp_path / "f32.gguf", gguf.GGMLQuantizationType.F32)))
    cpu, repacked, got = answers(name), answers(name, repack=True), answers(name, DEVICE)
    for who, its in ((DEVICE, got), ("the CPU", cpu), ("the CPU, repacked", repacked)):
        sys.stdout.write(
            f"{who}: probabilities within {furthest(its, exact):.1e} of F32's, {furthest(its, cpu):.1e} of the CPU's, "
            f"{furthest(its, repacked):.1e} of the repacked CPU's; perplexity {its[1]:.3f}, F32's {exact[1]:.3f}\n"
        )
    for theirs in (cpu, repacked, exact):
        assert [int(np.argmax(row)) for row in got[0]] == [int(np.argmax(row)) for row in theirs[0]]
        assert abs(got[1] / theirs[1] - 1) < 0.01
    # Not of the CPU's own, which are further from these than the device's.
    assert furthest(got, exact) < 2e-2
