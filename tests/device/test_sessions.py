"""Gate g: three decisions and a generate() after them, with a device, equal the same session all on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import GenerateRequest, Sampling, Session
from bmoe_native import Engine, Streaming
from tests import tiny
from tests.device.server import Server
from tests.gates import gates
from tests.gates.test_gates import letters_only


def talk(path: Path, prefix_cache: str, device: str, streaming: Streaming | None) -> tuple[Any, ...]:
    engine = Engine.open(path, n_ubatch=64, n_threads=1, repack=False, prefill_device=device, streaming=streaming)
    assert engine.info.prefill_device == device
    with Session(engine, prefix_cache=prefix_cache) as session:
        asked = [(gates.PREFIX, gates.SUFFIXES[0]), (gates.GROWN, gates.SUFFIXES[1]), (gates.GROWN, gates.SUFFIXES[0])]
        decided = [gates.ask(session, *question).choice_logp for question in asked]
        hot = Sampling(temperature=1.5, seed=5)
        told = session.generate(GenerateRequest(prompt=gates.TURNS[1], n_predict=24, sampling=hot))
        assert (engine.counters().dev_tokens > 64) == bool(device)
        return decided, told.text, engine.logits()


@pytest.mark.parametrize("prefix_cache", ["off", "on"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_session_answers_as_on_the_cpu(family: str, prefix_cache: str, server: Server, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", arch=family, n_ctx_train=1024, head=letters_only)
    wanted = talk(path, prefix_cache, "", None)
    ways = [None, Streaming(cache_bytes=0)] if tiny.FAMILIES[family].metadata.get("expert_count") else [None]
    for streaming in ways:
        got = talk(path, prefix_cache, server.name(), streaming)
        assert got[:2] == wanted[:2] and wanted[1]
        np.testing.assert_array_equal(got[2], wanted[2])
