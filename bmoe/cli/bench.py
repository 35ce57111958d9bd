"""bmoe bench"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe import bench as measuring
from bmoe.bench import Decision, Plan, Report
from bmoe.cli.experts import (
    MIB,
    CacheMbFlag,
    ExpertFlags,
    IoThreadsFlag,
    MoeStreamFlag,
    NoOdirectFlag,
    NoRepackFlag,
    PrefetchFlag,
    described,
    opened,
)
from bmoe.cli.opening import CtxFlag, JsonFlag, ModelFlag, ThreadsFlag, UbatchFlag, model_path
from bmoe.cli.shell import Shell
from bmoe.cli.texts import file_text
from bmoe.decide import Refused

DEFAULT_TOKENS = "70,280"
DEFAULT_REPEAT = 3

HELP = """What does a decision cost on this machine, beside what it cannot do without?

Floors are measured in the same run: the I/O floor is what was missing in memory over the bandwidth of reads alone, the
compute floor the same prefill with every expert in memory. Ratios are to the larger of the two.

\b
Examples:
  bmoe bench -m model.gguf --moe-stream --cache-mb 3000
  bmoe bench -m model.gguf --moe-stream --prompt a.txt --prompt b.txt --json
  bmoe bench -m dense.gguf --tokens 100,1000 --repeat 5

\b
Prompts of one length, and all files, are a run of their own: the model is
opened, the first decision finds no expert in memory, the others find what
those before them left.

\b
Exit codes:
  0 measured   1 engine failed   2 refused, wrong usage   130 interrupted
"""


def bench(
    ctx: typer.Context,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N,...", help=f"Lengths of made-up prompts. [{DEFAULT_TOKENS}]")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", metavar="N", min=1, help=f"Prompts of each length. [{DEFAULT_REPEAT}]")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="FILE", help="A prompt in place of made-up ones; repeat.")
    ] = None,
    no_template: Annotated[bool, typer.Option("--no-template", help="A FILE is the prompt itself.")] = False,
    drop_caches: Annotated[bool, typer.Option("--drop-caches", help="Empty the page cache first; root only.")] = False,
    model: ModelFlag = None,
    threads: ThreadsFlag = 0,
    ctx_tokens: CtxFlag = 0,
    ubatch: UbatchFlag = 0,
    moe_stream: MoeStreamFlag = False,
    cache_mb: CacheMbFlag = None,
    io_threads: IoThreadsFlag = None,
    no_odirect: NoOdirectFlag = False,
    prefetch: PrefetchFlag = None,
    no_repack: NoRepackFlag = False,
    as_json: JsonFlag = False,
) -> None:
    experts = ExpertFlags.typed(ctx)
    if prompt and (tokens is not None or repeat is not None):
        raise Refused("--prompt takes the place of --tokens and --repeat: leave them out")
    if no_template and not prompt:
        raise Refused("--no-template does nothing without --prompt")
    plan = Plan(
        lengths=() if prompt else lengths(DEFAULT_TOKENS if tokens is None else tokens),
        texts=tuple((Path(file).stem, file_text("--prompt", file)) for file in prompt or ()),
        template=not no_template,
        repeat=DEFAULT_REPEAT if repeat is None else repeat,
        streaming=experts.streaming,
        repack=experts.repack,
        n_threads=threads,
        n_ubatch=ubatch,
        n_ctx=ctx_tokens,
        drop_caches=drop_caches,
    )
    shell: Shell = ctx.obj
    if experts.without_effect:
        shell.note(f"bmoe: {experts.without_effect}")
    path = model_path(shell, model)
    with shell.err.status("measuring") as status:
        report = measuring.measure(path, plan, on_stage=status.update)
    for text in opened(report.info, experts, in_detail=False):
        shell.note(f"bmoe: {text}")
    if as_json:
        shell.emit({"model": path.name, **record(report)})
    else:
        shell.out.print(shown(report, path.name, experts))


def lengths(text: str) -> tuple[int, ...]:
    """Raises: Refused, for what is no list of lengths."""
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() and 1 <= int(number[:9]) < 10**8 for number in numbers):
        raise Refused(f"--tokens must be whole numbers from 1 with commas between them, not {text!r}")
    return tuple(map(int, numbers))


def record(report: Report) -> dict[str, Any]:
    """A report as a JSON object; null where something was not measured. Source: docs/benchmarks.md."""
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
        "look_ahead": plan.streaming is not None and plan.streaming.look_ahead,
        "repack": plan.repack,
        "threads": info.n_threads,
        "ubatch": info.n_ubatch,
        "drop_caches": plan.drop_caches,
        "bandwidth_mib_s": report.bytes_per_s / MIB if report.bytes_per_s else None,
        "probes": probes,
        "decisions": [decision_record(decision) for decision in report.decisions],
        "anonymous_peak_mib": _mib(memory.anonymous_bytes),
        "cgroup_peak_mib": _mib(memory.cgroup_bytes),
        "cgroup_limit_mib": _mib(memory.cgroup_limit_bytes),
    }


def decision_record(decision: Decision) -> dict[str, Any]:
    spent, floor = decision.spent, decision.compute_floor
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
        "routed_mib": spent.routed_bytes / MIB,
        "missing_mib": decision.missing_bytes / MIB,
        "read_mib": spent.read_bytes / MIB,
        "ahead_mib": spent.ahead_bytes / MIB,
        "wasted_mib": spent.wasted_bytes / MIB,
        "n_hits": spent.n_hits,
        "n_misses": spent.n_misses,
        "n_major_faults": spent.n_major_faults,
    }


def _mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / MIB


# The table.


def shown(report: Report, name: str, experts: ExpertFlags) -> RenderableType:
    """What was measured, 80 columns wide: times and floors, then what was read."""
    lines = [Text(line) for line in _above(report, name, experts)]
    notes = [Text(line, "dim") for line in _below(report)]
    tables = [_times(report.decisions)]
    if report.info.is_streamed:
        tables += [_reads(report.decisions)]
    return Group(*lines, *tables, *notes)


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
