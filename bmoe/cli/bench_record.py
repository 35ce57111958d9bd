"""What bmoe bench measured, as a JSON object. Source: docs/benchmarks.md."""

import dataclasses
from typing import Any

from bmoe.bench import TIMES, Cached, Comparison, Decision, Report, Stock, Way
from bmoe.cli.experts import MIB


def record(report: Report) -> dict[str, Any]:
    """A report as a JSON object; null where something was not measured."""
    info, plan, memory = report.info, report.plan, report.memory
    probes = [
        {
            "mib_s": probe.bytes_per_s / MIB,
            "is_direct": probe.is_direct,
            "io_threads": probe.n_threads,
            "n_requests": probe.n_requests,
            "request_mib": probe.n_bytes / probe.n_requests / MIB,
        }
        for probe in report.probes
    ]
    return {
        "weights_mib": info.weights_bytes / MIB,
        "experts_mib": info.experts_bytes / MIB,
        "n_moe_layer": info.n_moe_layer,
        "is_streamed": info.is_streamed,
        "prefetch": plan.streaming.prefetch if plan.streaming else None,
        "dense_weights": plan.streaming.dense if plan.streaming else None,
        "repack": plan.repack,
        "n_expert_used": info.n_expert_used,
        "threads": info.n_threads,
        "ubatch": info.n_ubatch,
        "drop_caches": plan.drop_caches,
        "bandwidth_mib_s": report.bytes_per_s / MIB if report.bytes_per_s else None,
        "probes": probes,
        "decisions": [decision_record(decision) for decision in report.decisions],
        "cached": [cached_record(cached) for cached in report.cached],
        "stock": stock_record(report.stock) if report.stock else None,
        "anonymous_peak_mib": _mib(memory.anonymous_bytes),
        "cgroup_peak_mib": _mib(memory.cgroup_bytes),
        "cgroup_limit_mib": _mib(memory.cgroup_limit_bytes),
    }


def decision_record(decision: Decision) -> dict[str, Any]:
    spent, floor, bound = decision.spent, decision.compute_floor, decision.bound
    seconds = {
        "open": decision.open_s,
        "wall": decision.wall_s,
        "cpu": spent.prefill_cpu_s,
        "io": spent.io_s,
        "stall": spent.stall_s,
        "mgmt": spent.mgmt_s,
    }
    return {
        "prompt": decision.name,
        "n_tokens": spent.n_tokens,
        "is_cold": decision.is_cold,
        "cache_budget_mib": decision.cache_bytes / MIB,
        **{f"{name}_s": value for name, value in seconds.items()},
        "io_floor_s": decision.io_floor_s,
        "compute_floor_s": floor.s,
        "compute_floor_estimated": floor.estimated_because or None,
        "floor_s": decision.floor_s,
        **{f"{name}_ratio": value / decision.floor_s for name, value in seconds.items()},
        "peak_anonymous_bytes": decision.peak_anonymous_bytes,
        "anonymous_before_bytes": decision.anonymous_before_bytes,
        "anonymous_bound_bytes": bound.n_bytes if bound else None,
        "anonymous_bound": dataclasses.asdict(bound) if bound else None,
        "anonymous_ratio": decision.anonymous_ratio,
        "routed_mib": spent.routed_bytes / MIB,
        "missing_mib": decision.missing_bytes / MIB,
        "read_mib": spent.read_bytes / MIB,
        "ahead_mib": spent.ahead_bytes / MIB,
        "wasted_mib": spent.wasted_bytes / MIB,
        "n_hits": spent.n_hits,
        "n_misses": spent.n_misses,
        "n_major_faults": spent.n_major_faults,
    }


def cached_record(cached: Cached) -> dict[str, Any]:
    return {
        "prompt": cached.name,
        "streamed_warm_s": list(cached.streamed_s),
        "resident_warm_s": list(cached.resident_s),
        "cached_ratio": cached.ratio,
        "unmeasured": cached.unmeasured_because or None,
    }


def stock_record(stock: Stock) -> dict[str, Any]:
    return {
        "page_cache": stock.page_cache,
        "comparisons": [comparison_record(comparison) for comparison in stock.comparisons],
    }


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    quicker = {time: comparison.quicker(time) for time in TIMES}
    return {
        "prompts": list(comparison.names),
        "prompt_tokens": list(comparison.n_tokens),
        "ways": [way_record(way) for way in comparison.ways],
        "quicker_stock": {time: way.name if way else None for time, way in quicker.items()},
        "stock_ratio": {time: comparison.ratio(time) for time in TIMES},
    }


def way_record(way: Way) -> dict[str, Any]:
    return {
        "way": way.name,
        "unmeasured": way.unmeasured_because or None,
        "median": {time: way.median_s(time) for time in TIMES},
        "repetitions": [
            {**dataclasses.asdict(one), "answer_without_imports_s": one.answer_without_imports_s}
            for one in way.repetitions
        ],
    }


def _mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / MIB
