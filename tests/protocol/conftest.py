from pathlib import Path
from typing import Any

import pytest

from tests import tiny


def _endless(rows: Any) -> Any:
    """Output rows such that the likeliest token is never one that ends the turn."""
    rows[[index for index, token in enumerate(tiny.vocabulary()[0]) if token.startswith("<|")]] = 0
    return rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for prompts that take long, and turns that end when they are told to."""
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=16384, head=_endless)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts."""
    folder = tmp_path_factory.mktemp("moe")
    return tiny.write(folder / "moe.gguf", arch="qwen3moe", n_ctx_train=16384, head=_endless)
