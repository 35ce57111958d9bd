"""A prefill device with the CPU's own kernels, so that it has to compute the CPU's bits."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bmoe_native import Engine
from tests import tiny
from tests.device.server import PROGRAM, Server

# For another build of the library, as `make vulkan` makes it.
collect_ignore = [] if os.environ.get("BMOE_TEST_DEVICE") else ["test_vulkan.py"]


@pytest.fixture(scope="session")
def rpc_library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where libbmoe was not built to take such a device."""
    if not PROGRAM.is_file():
        pytest.skip("no RPC server: `make cxx` builds it")
    path = tiny.write(tmp_path_factory.mktemp("device") / "probe.gguf")
    with Engine.open(path, prefill_device="RPC:127.0.0.1:1", on_log=lambda _level, _text: None) as engine:
        if "there is no device" in engine.info.prefill_device_why:
            pytest.skip("libbmoe was built without BMOE_TEST_RPC, which `make .venv/ready-dev` builds it with")


@pytest.fixture(scope="session")
def server(rpc_library: None) -> Iterator[Server]:
    started = Server()
    yield started
    started.kill()


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("device")
    return {name: tiny.write(folder / f"{name}.gguf", arch=name, n_ctx_train=1024) for name in tiny.FAMILIES}
