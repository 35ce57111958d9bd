"""The gates on every family, and each gate failing where what it guards is broken on purpose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import Session
from bmoe.aside import Aside
from bmoe.backends import DecidingBackend
from bmoe.decide import KeptPrefix, decider
from bmoe.decide.perplexity import Perplexity
from tests import tiny
from tests.gates import gates

Gate = Callable[[Path, int], None]
ALL: dict[str, Gate] = {
    "a": gates.gate_a,
    "b": gates.gate_b,
    "c": gates.gate_c,
    "e": gates.gate_e,
    "f": gates.gate_f,
}


def letters_only(rows: Any) -> Any:
    """A head that likes letters that merge with nothing: what it writes is tokenized again as it was written."""
    tokens = tiny.vocabulary()[0]
    liked = [tokens.index(letter) for letter in "bcdfgjklmpqsuvwxyz"]
    changed = np.zeros_like(rows)
    changed[liked] = 8 * rows[liked]
    return changed


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gates")
    return {
        name: tiny.write(folder / f"{name}.gguf", arch=name, n_ctx_train=1024, head=letters_only)
        for name in tiny.FAMILIES
    }


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("gate", ALL)
def test_gate(gate: str, family: str, n_threads: int, paths: dict[str, Path]) -> None:
    ALL[gate](paths[family], n_threads)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("length", [2, 200])
def test_gate_a_whatever_the_prefix_is_long(family: str, length: int, paths: dict[str, Path]) -> None:
    gates.gate_a(paths[family], 1, ("x" + gates.GROWN * 2)[:length], template=False)


# What is broken, the gate that must see it, on which family.


def restore_nothing(patch: pytest.MonkeyPatch) -> None:
    """What was kept is dropped in place of restored."""
    patch.setattr(DecidingBackend, "load_state", lambda self, state: self.drop_state())


def store_late(patch: pytest.MonkeyPatch) -> None:
    """The state is stored under tokens that it has not all seen."""
    real = KeptPrefix.store
    patch.setattr(
        KeptPrefix, "store", lambda self, backend, tokens: real(self, backend, [*tokens[:-1], tokens[-1] ^ 1])
    )


def give_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """The last token that prefix and prompt share is kept, though what follows may merge with it."""
    real = decider.tokens_to_keep
    patch.setattr(decider, "tokens_to_keep", lambda prompt, alone: min(real(prompt, alone) + 1, len(prompt) - 1))


def prefill_on(patch: pytest.MonkeyPatch) -> None:
    """A whole prompt goes after what the state holds."""
    patch.setattr(Perplexity, "_choices", _choices_without_drop)


def _choices_without_drop(self: Any, tokens: Any, choices: Any, work: Any) -> Any:
    real, self._backend.drop_state = self._backend.drop_state, lambda: None
    try:
        work.add(self._backend.prefill(tokens))
        from bmoe.decide.score import score

        return score(self._backend.logits(), choices).choice_logp
    finally:
        self._backend.drop_state = real


def nothing_aside(patch: pytest.MonkeyPatch) -> None:
    """A decision replaces the conversation's state, and the conversation does not know."""
    patch.setattr(Aside, "put", lambda self: None)


def window_as_it_was(patch: pytest.MonkeyPatch) -> None:
    """A window that no decision has moved is not laid out as one that was put aside and taken back."""
    real = Aside.take_back

    def take_back(self: Any) -> None:
        if self._state is not None:
            real(self)

    patch.setattr(Aside, "take_back", take_back)


def decide_all_the_same(patch: pytest.MonkeyPatch) -> None:
    """A session without decisions has them."""
    real = Session.__init__

    def init(self: Any, engine: Any, **options: Any) -> None:
        real(self, engine, **{**options, "decide": True})

    patch.setattr(Session, "__init__", init)


BREAKS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (restore_nothing, "a", "llama"),
    (restore_nothing, "a", "mamba"),
    (restore_nothing, "b", "qwen3next"),
    (store_late, "a", "llama"),
    (give_nothing_back, "b", "llama"),
    (prefill_on, "c", "llama"),
    (nothing_aside, "e", "llama"),
    (nothing_aside, "e", "granitehybrid"),
    (window_as_it_was, "e", "gemma3"),
    (decide_all_the_same, "f", "llama"),
]


@pytest.mark.parametrize(("break_it", "gate", "family"), BREAKS)
def test_the_gate_sees_what_is_broken(
    break_it: Callable[[pytest.MonkeyPatch], None],
    gate: str,
    family: str,
    paths: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        ALL[gate](paths[family], 1)
