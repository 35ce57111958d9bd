"""benchmarks/prefill_device.py, at its smallest."""

import re
import subprocess
import sys
from pathlib import Path

from tests import tiny
from tests.device.server import Server

ROOT = Path(__file__).parents[2]


def test_what_is_brought_is_what_routers_asked_for(server: Server, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "m.gguf", arch="qwen3moe", n_ctx_train=1024)
    (tmp_path / "prompt.txt").write_text("one expert after the other " * 4)
    command = [
        sys.executable,
        "benchmarks/prefill_device.py",
        model,
        tmp_path / "prompt.txt",
        "--device",
        server.name(),
    ]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    counts = re.search(r"routed to (\d+) experts.* the device's count: (\d+)\n", done.stdout)
    assert counts and int(counts[1]) == int(counts[2]) > 0
    assert f"not foreseen: {counts[1]}, and 0 of the same prompt again" in done.stdout
    assert "the CPU's bits: yes" in done.stdout
