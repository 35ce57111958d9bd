from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for prompts that take long."""
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=16384)
