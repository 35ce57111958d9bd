"""docs/architecture.md shows the imports and includes that the code has, and they point one way."""

import subprocess
import sys

from tests.build.conftest import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import architecture  # type: ignore[import-not-found, unused-ignore]


def test_the_map_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "packaging" / "architecture.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrows_point_one_way() -> None:
    python = architecture.python_edges()
    assert python["bmoe_native"] == set()
    assert python["bmoe/decide"] == set()
    assert not [unit for unit, uses in python.items() if "bmoe/cli" in uses and unit != "bmoe/cli"]
    c = architecture.c_edges()
    assert [unit for unit, uses in c.items() if "api" in uses] == []
    assert {"engine", "error", "handles", "llama.cpp", "bmoe.h"} <= c["api"]


def test_the_map_holds_every_piece() -> None:
    text = architecture.drawn()
    for name in ("`bmoe/session`", "`bmoe/decide`", "`experts/store`", "`os/cpu`", "`prefill`"):
        assert f"\n| {name} |" in text
