"""What bmoe bench measured, as tables 80 columns wide."""

from collections.abc import Iterator
from statistics import median

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.bench import TIMES, Cached, Comparison, Decision, Report, Stock, Way
from bmoe.cli.experts import MIB, ExpertFlags, described


def shown(report: Report, name: str, experts: ExpertFlags) -> RenderableType:
    """Times and floors, what was read, what was kept in memory, and the stock way beside it."""
    lines = [Text(line) for line in _above(report, name, experts)]
    notes = [Text(line, "dim") for line in _below(report)]
    tables = [_times(report.decisions)]
    if report.info.is_streamed:
        tables += [_reads(report.decisions), _peaks(report.decisions)]
    beside = [*map(Text, _cached(report.cached)), *(_stock(report.stock) if report.stock else ())]
    return Group(*lines, *tables, *notes, *beside)


def _above(report: Report, name: str, experts: ExpertFlags) -> Iterator[str]:
    info, memory = report.info, report.memory
    yield f"{name}: {info.weights_bytes / MIB:.0f} MiB of weights, {info.n_threads} threads"
    if info.is_streamed:
        yield described(info, experts)
    for probe, when in zip(report.probes, ("before", "after"), strict=False):
        how = "direct" if probe.is_direct else "buffered"
        yield (
            f"{how} reads of {probe.n_bytes / probe.n_requests / MIB:.2f} MiB at random by {probe.n_threads} threads, "
            f"{when}: {probe.bytes_per_s / MIB:.0f} MiB/s"
        )
    opens = {decision.open_s: f"{decision.open_s:.2f}" for decision in report.decisions}
    yield f"opened in {', '.join(opens.values())} s"
    if memory.anonymous_bytes is not None:
        yield f"peak of anonymous memory {memory.anonymous_bytes / MIB:.0f} MiB"
    if memory.cgroup_bytes is not None and memory.cgroup_limit_bytes is not None:
        yield f"peak of the cgroup {memory.cgroup_bytes / MIB:.0f} MiB of {memory.cgroup_limit_bytes / MIB:.0f}"


def _below(report: Report) -> Iterator[str]:
    yield "* the first of its run, after opening; in seconds; ratio: wall to the larger floor"
    reasons = {decision.compute_floor.estimated_because for decision in report.decisions} - {""}
    for reason in sorted(reasons):
        yield f"~ not measured: {reason}. It is CPU seconds over threads"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("prompt", overflow="fold", max_width=14)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _named(decision: Decision) -> Text:
    return Text(f"{decision.name}{' *' if decision.is_cold else ''}")


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _times(decisions: tuple[Decision, ...]) -> Table:
    table = _table("tokens", "wall", "CPU", "I/O", "stall", "I/O floor", "compute", "ratio")
    for decision in decisions:
        spent, floor = decision.spent, decision.compute_floor
        seconds = (decision.wall_s, spent.prefill_cpu_s, spent.io_s, spent.stall_s, decision.io_floor_s)
        table.add_row(
            _named(decision),
            str(spent.n_tokens),
            *map(_seconds, seconds),
            f"{'~' if floor.estimated_because else ''}{_seconds(floor.s)}",
            f"{decision.wall_s / decision.floor_s:.2f}",
        )
    return table


def _reads(decisions: tuple[Decision, ...]) -> Table:
    table = _table("MiB routed", "missing", "read", "ahead", "wasted", "hits", "misses", "faults")
    for decision in decisions:
        spent = decision.spent
        sizes = (spent.routed_bytes, decision.missing_bytes, spent.read_bytes, spent.ahead_bytes, spent.wasted_bytes)
        counts = (spent.n_hits, spent.n_misses, spent.n_major_faults)
        table.add_row(_named(decision), *(f"{size / MIB:.0f}" for size in sizes), *map(str, counts))
    return table


def _peaks(decisions: tuple[Decision, ...]) -> Table:
    table = _table("MiB anonymous", "bound", "dense", "buffers", "budget", "ratio")
    for decision in decisions:
        bound, ratio = decision.bound, decision.anonymous_ratio
        parts = (bound.n_bytes, bound.dense_bytes, bound.buffers_bytes, bound.cache_bytes) if bound else (None,) * 4
        sizes = (decision.peak_anonymous_bytes, *parts)
        table.add_row(
            _named(decision),
            *("" if size is None else f"{size / MIB:.0f}" for size in sizes),
            "" if ratio is None else f"{ratio:.2f}",
        )
    return table


def _cached(all_cached: tuple[Cached, ...]) -> Iterator[str]:
    for cached in all_cached:
        if cached.ratio is None:
            yield f"{cached.name}, streamed with every expert kept, to resident: {cached.unmeasured_because}"
        else:
            yield (
                f"{cached.name}, streamed with every expert kept: {_seconds(median(cached.streamed_s))} s, "
                f"resident {_seconds(median(cached.resident_s))} s, ratio {cached.ratio:.3f}"
            )


def _stock(stock: Stock) -> Iterator[RenderableType]:
    """Each comparison, and what was left out of it."""
    how = "the page cache" if stock.page_cache == "drop_caches" else "the page cache of the model's files"
    yield Text(f"\nProcesses of their own, {how} emptied before each; seconds, medians (least - most):")
    for comparison in stock.comparisons:
        first, second = comparison.n_tokens
        yield Text(f"\n{comparison.names[0]} ({first} tokens), then {comparison.names[1]} ({second})")
        yield _ways(comparison)
        for way in comparison.ways:
            if way.unmeasured_because:
                yield Text(f"{way.name}: {way.unmeasured_because}", "dim")
        for time, words in zip(TIMES, ("first answer", "without imports", "warm"), strict=True):
            quicker, ratio = comparison.quicker(time), comparison.ratio(time)
            if quicker and ratio:
                yield Text(f"{words}: {quicker.name} takes {ratio:.2f} times as long as streamed")


def _ways(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("way", no_wrap=True)
    for heading in ("first answer", "without imports", "warm"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in comparison.ways:
        table.add_row(way.name, *(_spread(way, time) for time in TIMES))
    return table


def _spread(way: Way, time: str) -> str:
    middle = way.median_s(time)
    if middle is None:
        return ""
    each = sorted(getattr(one, time) for one in way.repetitions)
    return f"{middle:.2f} ({each[0]:.2f} - {each[-1]:.2f})"
