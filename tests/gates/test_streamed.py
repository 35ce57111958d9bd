"""Streamed experts compute the bits of resident ones, however they come and go (gate d)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import Session
from bmoe_native import Engine, Streaming
from tests import tiny
from tests.gates import gates
from tests.gates.test_gates import ALL, letters_only

FAMILIES = [name for name, family in tiny.FAMILIES.items() if family.metadata.get("expert_count")]
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 300)]
PROMPTS = ((0, 1), (0, 70), (70, 200), (0, 300), (5, 300))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("streamed")
    return {
        name: tiny.write(folder / f"{name}.gguf", arch=name, n_ctx_train=1024, head=letters_only) for name in FAMILIES
    }


def bits(path: Path, n_ubatch: int, n_threads: int, streaming: Streaming | None) -> Iterator[Any]:
    with Engine.open(path, n_ubatch=n_ubatch, n_threads=n_threads, repack=False, streaming=streaming) as engine:
        assert engine.info.is_streamed == (streaming is not None)
        for begin, end in PROMPTS:
            if begin == 0:
                engine.drop_state()
            engine.prefill(TOKENS[begin:end])
            yield engine.logits()


def budgets(path: Path) -> tuple[int, int, int]:
    """Nothing kept; some of each layer, so that each graph evicts; everything."""
    with Engine.open(path, inspect=True) as engine:
        return 0, engine.info.experts_bytes // 3, engine.info.experts_bytes


@pytest.mark.parametrize("n_ubatch", [32, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_is_resident(family: str, n_ubatch: int, paths: dict[str, Path]) -> None:
    path = paths[family]
    wanted = list(bits(path, n_ubatch, 1, None))
    none, some, everything = budgets(path)
    ways = [
        (none, "off", 1, 1, True, "mmap"),
        (none, "both", 2, 8, False, "anon"),
        (some, "off", 2, 1, False, "anon"),
        (some, "previous", 1, 8, True, "mmap"),
        (some, "router", 2, 1, True, "mmap"),
        (everything, "both", 2, 8, True, "anon"),
    ]
    for cache_bytes, prefetch, n_threads, io_threads, direct, dense in ways:
        streaming = Streaming(
            cache_bytes=cache_bytes, prefetch=prefetch, io_threads=io_threads, direct=direct, dense=dense
        )
        for got, resident in zip(bits(path, n_ubatch, n_threads, streaming), wanted, strict=True):
            np.testing.assert_array_equal(got, resident, err_msg=str(streaming))


@pytest.mark.parametrize("gate", ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gates_hold_streamed(
    gate: str, family: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, n_threads: int, **options: Any) -> Session:
        streaming = Streaming(cache_bytes=budgets(path)[1])
        return Session.open(path, n_threads=n_threads, n_ubatch=64, streaming=streaming, **options)

    monkeypatch.setattr(gates, "opened", opened)
    ALL[gate](paths[family], 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_decision_is_a_resident_one(family: str, paths: dict[str, Path]) -> None:
    answers = []
    for streaming in (None, Streaming(cache_bytes=0), Streaming(cache_bytes=budgets(paths[family])[1])):
        with Session.open(paths[family], n_ubatch=64, repack=False, streaming=streaming) as session:
            first = gates.ask(session, gates.PREFIX, gates.SUFFIXES[0])
            answers.append(
                [first.choice_logp, *(gates.ask(session, gates.GROWN, s).choice_logp for s in gates.SUFFIXES)]
            )
    assert answers[0] == answers[1] == answers[2]


def test_a_slice_that_is_not_read_is_seen(paths: dict[str, Path], tmp_path: Path) -> None:
    """The same file with one expert's bytes changed computes other bits: the comparison above can fail."""
    path = paths["qwen3moe"]
    changed = tiny.write(tmp_path / "changed.gguf", arch="qwen3moe", n_ctx_train=1024, head=letters_only, change=spoil)
    streaming = Streaming(cache_bytes=0)
    wanted, got = list(bits(path, 512, 1, streaming)), list(bits(changed, 512, 1, streaming))
    assert any((a != b).any() for a, b in zip(wanted, got, strict=True))


def spoil(name: str, array: Any) -> Any:
    if name == "blk.1.ffn_down_exps.weight":
        array[3] = 0
    return array
