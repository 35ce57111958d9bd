"""A cancel, or the loss of the device, at each point at which the engine asks whether to go on."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest

from bmoe_native import Engine
from tests import tiny
from tests.device.server import Server
from tests.device.test_types import with_matrices_in

# The at-th time that it asks do() is called, and may cancel; until then poll() takes longer than it waits to ask again.
POLLED = """
    import json, sys, time
    from bmoe_native import Engine, EngineError
    from bmoe_native.hooks import Hooks
    tokens, n_polls, at, do = list(range(64)), 0, 0, lambda: False
    def poll(_hooks, _user):
        global n_polls
        n_polls += 1
        if n_polls <= at: time.sleep(0.021)
        return 1 if n_polls == at and do() else 0
    Hooks._poll = poll
    def opened(device, **hooks):
        engine = Engine.open(sys.argv[1], n_ubatch=64, n_threads=1, prefill_device=device, **hooks)
        assert engine.info.prefill_device, engine.info.prefill_device_why
        return engine
"""


def polled(path: Path, code: str, device: str = "") -> list[str]:
    """What it prints. It may hang or be ended by a signal."""
    command = [sys.executable, "-c", textwrap.dedent(POLLED) + textwrap.dedent(code), path, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_device_that_is_lost_before_it_is_asked_what_a_hook_is_told(
    paths: dict[str, Path], rpc_library: None
) -> None:
    code = """
        from tests.device.server import Server
        lost, seen = True, []
        while lost:
            server, at, n_polls = Server(), at + 1, 0
            do = server.kill
            with opened(server.name("slow=5"), on_layer=lambda layer, _state: seen.append(layer)) as engine:
                try:
                    engine.prefill(tokens)
                    lost = False
                except EngineError as error:
                    assert "the prefill device was lost" in str(error), error
                    print(*seen, sep="")
            seen.clear()
            server.kill()
    """
    assert {"", "0", "01"} <= set(polled(paths["llama"], code))


def test_what_a_cancel_leaves_uncomputed_chooses_no_experts(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU reads those that a device refuses, in a part of the graph that may begin with them."""
    monkeypatch.setitem(tiny.FAMILIES, "qwen3moe", dataclasses.replace(tiny.FAMILIES["qwen3moe"], n_layer=1))
    path = with_matrices_in(
        tiny.write(tmp_path / "f32.gguf", arch="qwen3moe"),
        tmp_path / "m.gguf",
        gguf.GGMLQuantizationType.F16,
        but="_exps",
    )
    code = """
        do, cancelled = lambda: True, True
        with opened(sys.argv[2], repack=False) as engine:
            while cancelled:
                n_polls = 1000
                engine.drop_state()
                result = engine.prefill(tokens)  # what is left of it is no choice of experts
                engine.drop_state()
                n_polls, at = 0, at + 1
                cancelled = engine.prefill(tokens).cancelled
                engine.clear_cancel()
            print(at, result.dev_tokens, result.dev_routed)
            print(json.dumps(engine.logits().tolist()))
    """
    counts, logits = polled(path, code, server.name("refuse=f32&slow=20"))
    n_cancels, dev_tokens, dev_routed = map(int, counts.split())
    assert n_cancels > 5 and (dev_tokens, dev_routed) == (64, 0)
    with Engine.open(path, n_ubatch=64, n_threads=1, repack=False) as plain:
        plain.prefill(list(range(64)))
        np.testing.assert_array_equal(np.float32(json.loads(logits)), plain.logits())
