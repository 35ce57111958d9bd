"""The named models, and: where BMOE_REQUIRE_ALL is set, as in CI, a test that is skipped has failed.

Where BMOE_TEST_BUILD names a build folder, its library and programs are tested, as `make sanitize-thread` does.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from bmoe import models
from bmoe_native import _bmoe_cffi  # type: ignore[attr-defined]
from tests.shim import built

# Whoever starts tests in the background has them ignore Ctrl-C, and the processes that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

if build := os.environ.get("BMOE_TEST_BUILD"):
    _bmoe_cffi.__file__ = os.path.join(build, "libbmoe.so")
    # And in the processes that tests start.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent / "sanitized")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of tests/shim.py."""
    return built(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def named_models() -> list[Path]:
    """Every named model's file, fetched on first use."""
    cache = Path(os.environ.get("BMOE_CACHE") or models.default_cache())
    return [models.resolve(model.name, cache) for model in models.CATALOG]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("BMOE_REQUIRE_ALL") and not item.get_closest_marker("optional"):
        report.outcome = "failed"
        report.longrepr = f"skipped where every test is required: {report.longrepr}"
    return report
