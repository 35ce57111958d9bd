"""Engines over tiny models for the binding's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bmoe_native import Engine
from tests import tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", n_ctx_train=4096)


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "moe.gguf", arch="qwen3moe", n_ctx_train=4096)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine.open(tiny_path, n_ctx=256, n_ubatch=32) as engine:
        yield engine
