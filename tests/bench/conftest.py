"""Tiny models to measure."""

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("moe") / "m.gguf", arch="qwen3moe")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("dense") / "m.gguf")
