"""Measurements that take no longer than they must."""

from pathlib import Path
from typing import Any

from bmoe import bench
from bmoe.bench import Plan, Report
from bmoe_native.types import Streaming

PROBE_S = 0.01
EVERYTHING = Streaming(cache_bytes=2**40)


def measured(path: Path, **plan: Any) -> Report:
    return bench.measure(path, Plan(**{"probe_s": PROBE_S, "n_threads": 1, **plan}))
