"""In every Python that tests start: the library of the build that BMOE_TEST_BUILD names (see tests/conftest.py)."""

import contextlib
import os

with contextlib.suppress(ImportError, KeyError):
    build = os.environ["BMOE_TEST_BUILD"]
    from bmoe_native import _bmoe_cffi

    _bmoe_cffi.__file__ = os.path.join(build, "libbmoe.so")
