"""What a prefill device is brought of a streamed model: the experts a prompt is routed to, against whole layers.

    make cxx
    python benchmarks/make_moe.py bench24.gguf --layers 24 --prompts prompts
    python benchmarks/prefill_device.py bench24.gguf prompts/p70-0-0.txt prompts/p280-0-0.txt

For each prompt an engine is opened with the device, and one on the CPU, whose logits must be the same to the bit. The
device is a server of ggml's RPC that the tests use, in front of this machine's CPU: nothing about speed is to be
learned from it. With --device another one is taken, whose bits may differ.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from bmoe_native import Engine, Routing, Streaming
from tests.device.server import Server

MB = 10**6
STREAMING = Streaming(cache_bytes=0)


class Routed:
    """What routers asked for, counted apart from what was read."""

    def __init__(self) -> None:
        self.experts: dict[int, set[int]] = defaultdict(set)  # of each layer
        self.bytes_of: dict[int, int] = {}  # one expert of a layer

    def __call__(self, routing: Routing) -> None:
        self.experts[routing.layer].update(np.unique(routing.experts).tolist())
        self.bytes_of[routing.layer] = routing.expert_bytes

    @property
    def n_experts(self) -> int:
        return sum(map(len, self.experts.values()))

    @property
    def n_bytes(self) -> int:
        return sum(len(experts) * self.bytes_of[layer] for layer, experts in self.experts.items())


def measure(model: Path, prompt: Path, device: str) -> None:
    routed = Routed()
    with Engine.open(model, n_ubatch=512, streaming=STREAMING, prefill_device=device, on_routing=routed) as engine:
        if not engine.info.prefill_device:
            raise SystemExit(f"the device does not open: {engine.info.prefill_device_why}")
        tokens = engine.text_tokens(prompt.read_text(), add_bos=True)
        first = engine.prefill(tokens)
        logits = engine.logits()
        whole = engine.info.streamed_bytes
        n_experts, n_bytes = routed.n_experts, routed.n_bytes
        engine.drop_state()
        again = engine.prefill(tokens)
        same = np.array_equal(logits, engine.logits())
    with Engine.open(model, n_ubatch=512, streaming=STREAMING, repack=False) as engine:
        engine.prefill(tokens)
        equal = np.array_equal(logits, engine.logits())
    print(
        f"{prompt.name}: {len(tokens)} tokens, {first.dev_tokens} on the device\n"
        f"  routed to {n_experts} experts, {n_bytes / MB:.0f} MB; the device's count: {first.dev_routed}\n"
        f"  read {first.dev_read_bytes / MB:.0f} MB of {whole / MB:.0f}: {first.dev_read_bytes / whole:.3f} of whole "
        "layers\n"
        f"  not foreseen: {first.dev_demand}, and {again.dev_demand} of the same prompt again, which read "
        f"{again.dev_read_bytes / MB:.0f} MB\n"
        f"  the CPU's bits: {'yes' if equal and same else 'NO'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model with routed experts")
    parser.add_argument("prompts", type=Path, nargs="+", metavar="prompt", help="text file")
    parser.add_argument("--device", help="in place of the tests' server")
    options = parser.parse_args()
    server = None if options.device else Server(n_threads=2)
    try:
        for prompt in options.prompts:
            measure(options.model, prompt, options.device or server.name())
    finally:
        if server:
            server.kill()


if __name__ == "__main__":
    main()
