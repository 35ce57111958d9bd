"""Every family of memory and of experts: it remembers, it routes, and it computes the same bits again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bmoe_native import Engine, UnsupportedError
from tests import tiny

TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 256, 500)]
PROMPT = TOKENS[:300]
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1}


class Expected(NamedTuple):
    n_moe_layer: int = 0
    n_swa: int = 0
    is_hybrid: bool = False
    is_recurrent: bool = False
    n_shards: int = 1


EXPECTED = {
    "llama": Expected(),
    "qwen3moe": Expected(n_moe_layer=3),
    "qwen3moe-split": Expected(n_moe_layer=3, n_shards=4),
    "gemma3": Expected(n_swa=32),
    "gemma4": Expected(n_moe_layer=3, n_swa=32),
    "gpt-oss": Expected(n_moe_layer=3, n_swa=32),
    "deepseek2": Expected(n_moe_layer=2),  # the first layer is dense
    "qwen3next": Expected(n_moe_layer=4, is_hybrid=True),
    "qwen35moe": Expected(n_moe_layer=4, is_hybrid=True),
    "lfm2moe": Expected(n_moe_layer=3, is_hybrid=True),  # the first layer is dense
    "granitehybrid": Expected(n_moe_layer=4, is_hybrid=True),
    "mamba": Expected(is_recurrent=True),
}
# What joins tokens: with all of a model's parts silent it sees the last token only.
MEMORIES = {
    "qwen3next": ("attn_output.weight", "ssm_out.weight"),
    "qwen35moe": ("attn_output.weight", "ssm_out.weight"),
    "granitehybrid": ("attn_output.weight", "ssm_out.weight"),
    "mamba": ("ssm_out.weight",),
}
# What sees all tokens, and how far back the layers reach that remain when it is silent: two layers with a window, which
# holds the token itself, or two with a convolution of three taps.
REACH = {
    "gemma3": ("blk.2.", 2 * (tiny.WINDOW - 1)),
    "gemma4": ("blk.2.", 2 * (tiny.WINDOW - 1)),
    "gpt-oss": ("blk.1.", 2 * (tiny.WINDOW - 1)),
    "lfm2moe": ("", 2 * 2),
}

every_family = pytest.mark.parametrize("name", tiny.FAMILIES)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: tiny.write(folder / f"{name}.gguf", arch=name) for name in tiny.FAMILIES}


def logits(path: Path, *prefills: list[int]) -> np.ndarray:
    with Engine.open(path, **OPTIONS) as engine:
        for tokens in prefills:
            engine.prefill(tokens)
        return engine.logits()


def changed(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]


def silencing(*names: str) -> Callable[[str, Any], Any]:
    """A change for tiny.write: tensors whose name ends so are all zeros."""
    return lambda name, array: 0 * array if name.endswith(names) else array


@every_family
def test_the_info_tells_the_family(name: str, paths: dict[str, Path]) -> None:
    expected = EXPECTED[name]
    with Engine.open(paths[name], inspect=True) as engine:
        info = engine.info
    assert info.arch == tiny.FAMILIES[name].arch
    assert Expected(*(getattr(info, field) for field in Expected._fields)) == expected
    assert (info.n_expert, info.n_expert_used) == ((8, 2) if expected.n_moe_layer else (0, 0))
    assert (info.experts_bytes > 0) == (expected.n_moe_layer > 0)


@every_family
def test_logits_tell_tokens_apart_and_depend_on_the_first_one(name: str, paths: dict[str, Path]) -> None:
    plain = logits(paths[name], PROMPT)
    assert np.isfinite(plain).all()
    assert 1 < plain.std() < 20
    for at in (0, 150, 299):
        assert np.abs(logits(paths[name], changed(PROMPT, at)) - plain).max() > 0.01


@every_family
def test_two_engines_compute_the_same_bits(name: str, paths: dict[str, Path]) -> None:
    pieces = [PROMPT[at : at + 64] for at in range(0, 300, 64)]
    np.testing.assert_array_equal(logits(paths[name], PROMPT), logits(paths[name], *pieces))


@pytest.mark.parametrize("n_more", [1, 40, 130])
@pytest.mark.parametrize("n_kept", [10, 150, 256, 300])
@every_family
def test_a_fresh_engine_goes_on_from_a_saved_state(
    name: str, n_kept: int, n_more: int, paths: dict[str, Path], record_property: Callable[[str, object], None]
) -> None:
    more = TOKENS[n_kept : n_kept + n_more]
    with Engine.open(paths[name], **OPTIONS) as engine:
        engine.prefill(TOKENS[:n_kept])
        state = engine.save_state()
        engine.prefill(more)
        wanted = engine.logits()
    with Engine.open(paths[name], **OPTIONS) as engine:
        begin = time.perf_counter()
        engine.load_state(state)
        record_property("load_ms", 1e3 * (time.perf_counter() - begin))
        record_property("state_bytes", len(state))
        assert engine.position == n_kept
        engine.prefill(more)
        np.testing.assert_array_equal(engine.logits(), wanted)
        # and so does one that has been somewhere else meanwhile
        engine.drop_state()
        engine.prefill(TOKENS[100:420])
        engine.load_state(state)
        engine.prefill(more)
        np.testing.assert_array_equal(engine.logits(), wanted)


@pytest.mark.parametrize("restored", [False, True])
@every_family
def test_a_state_is_cut_exactly_or_not_at_all(name: str, restored: bool, paths: dict[str, Path]) -> None:
    """A restored window holds nothing from before it: cutting into what it left out must be refused."""
    for n_kept in (256, 128):  # whole pieces, or a fresh engine would cut the prompt elsewhere
        with Engine.open(paths[name], **OPTIONS) as engine:
            engine.prefill(PROMPT)
            if restored:
                engine.load_state(engine.save_state())
            try:
                engine.keep_state(n_kept)
            except UnsupportedError:
                assert engine.position == 300
                continue
            engine.prefill(TOKENS[300:340])
            np.testing.assert_array_equal(engine.logits(), logits(paths[name], TOKENS[:n_kept], TOKENS[300:340]))


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.n_moe_layer])
def test_each_token_is_routed_to_its_own_experts(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """An expert that is all zeros changes the logits of the tokens routed to it, and of no other."""
    tokens = range(0, 256, 8)

    def rows(path: Path) -> np.ndarray:
        with Engine.open(path, **OPTIONS) as engine:
            found = []
            for token in tokens:
                engine.drop_state()
                engine.prefill([token])
                found.append(engine.logits())
        return np.stack(found)

    plain, used = rows(paths[name]), []
    last = f"blk.{tiny.FAMILIES[name].n_layer - 1}.ffn_down_exps.weight"
    for expert in range(8):

        def without(tensor: str, array: Any, expert: int = expert) -> Any:
            if tensor == last:
                array[expert] = 0
            return array

        path = tiny.write(tmp_path / f"without-{expert}.gguf", arch=name, change=without)
        used.append((rows(path) != plain).any(axis=1))
    routes = np.stack(used)
    assert (routes.sum(axis=0) == 2).all()
    assert routes.any(axis=1).all()
    assert len({tuple(route) for route in routes.T}) > 8


@pytest.mark.parametrize("name", MEMORIES)
def test_each_kind_of_memory_reaches_the_first_token(name: str, tmp_path: Path) -> None:
    parts = MEMORIES[name]
    for part in parts:
        others = silencing(*(other for other in parts if other != part))
        path = tiny.write(tmp_path / "one.gguf", arch=name, change=others)
        assert np.abs(logits(path, changed(PROMPT, 0)) - logits(path, PROMPT)).max() > 0.001
    path = tiny.write(tmp_path / "no.gguf", arch=name, change=silencing(*parts))
    np.testing.assert_array_equal(logits(path, changed(PROMPT, 298)), logits(path, PROMPT))


@pytest.mark.parametrize("name", REACH)
def test_a_window_or_a_convolution_forgets_what_full_attention_remembers(name: str, tmp_path: Path) -> None:
    layer, reach = REACH[name]
    silent = silencing(f"{layer}attn_output.weight", f"{layer}attn_output.bias")
    path = tiny.write(tmp_path / "short.gguf", arch=name, change=silent)
    plain = logits(path, PROMPT)
    np.testing.assert_array_equal(logits(path, changed(PROMPT, 0)), plain)
    np.testing.assert_array_equal(logits(path, changed(PROMPT, 299 - reach - 1)), plain)
    assert np.abs(logits(path, changed(PROMPT, 299 - reach)) - plain).max() > 0
