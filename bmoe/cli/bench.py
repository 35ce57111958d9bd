"""bmoe bench"""

from pathlib import Path
from typing import Annotated

import typer

from bmoe import bench as measuring
from bmoe.bench import Plan
from bmoe.cli.bench_record import record
from bmoe.cli.bench_table import shown
from bmoe.cli.declared import shares, typed
from bmoe.cli.experts import ExpertFlags, opened
from bmoe.cli.opening import JsonFlag, ModelFlags, model_path
from bmoe.cli.shell import Shell
from bmoe.cli.texts import file_text
from bmoe.decide import Refused

DEFAULT_TOKENS = "70,280"
DEFAULT_REPEAT = 3

HELP = """What does a decision cost on this machine, beside what it cannot do without?

Floors are measured in the same run: the I/O floor is what was missing in memory over the bandwidth of reads alone, the
compute floor the same prefill with every expert in memory. Ratios are to the larger of the two. With --stock the same
model is also opened as llama.cpp does it, mapped and left to the page cache, in processes of their own that take turns
with streaming ones: from the start of each to its first answer, and to a warm one after it. That takes long.

\b
Examples:
  bmoe bench -m model.gguf --moe-stream --cache-mb 3000
  bmoe bench -m model.gguf --moe-stream --prompt a.txt --prompt b.txt --json
  bmoe bench -m model.gguf --moe-stream --stock --tokens 280 --repeat 5
  bmoe bench -m dense.gguf --tokens 100,1000 --repeat 5

\b
Prompts of one length, and all files, are a run of their own: the model is
opened, the first decision finds no expert in memory, the others find what
those before them left. With --stock, files are taken in pairs: what is
answered first, and what is after it; and --repeat is the number of
processes of each kind.

\b
Exit codes:
  0 measured   1 engine failed   2 refused, wrong usage   130 interrupted
"""


@shares(ModelFlags, ExpertFlags, before="as_json")
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
    stock: Annotated[bool, typer.Option("--stock", help="Compare with the model mapped, as llama.cpp does.")] = False,
    drop_caches: Annotated[bool, typer.Option("--drop-caches", help="Empty the page cache first; root only.")] = False,
    as_json: JsonFlag = False,
) -> None:
    flags, experts = typed(ModelFlags, ctx), typed(ExpertFlags, ctx)
    if prompt and (tokens is not None or (repeat is not None and not stock)):
        raise Refused("--prompt takes the place of --tokens and --repeat: leave them out")
    if no_template and not prompt:
        raise Refused("--no-template does nothing without --prompt")
    if stock and not experts.moe_stream:
        raise Refused("--stock compares with streaming: give --moe-stream")
    if stock and len(prompt or ()) % 2:
        raise Refused("--stock takes files in pairs: what is answered first, and what is after it")
    plan = Plan(
        lengths=() if prompt else lengths(DEFAULT_TOKENS if tokens is None else tokens),
        texts=tuple((Path(file).stem, file_text("--prompt", file)) for file in prompt or ()),
        template=not no_template,
        repeat=DEFAULT_REPEAT if repeat is None else repeat,
        stock=stock,
        streaming=experts.streaming,
        repack=experts.repack,
        n_threads=flags.threads,
        n_ubatch=flags.ubatch,
        n_ctx=flags.ctx_tokens,
        n_expert_used=flags.n_expert_used,
        drop_caches=drop_caches,
    )
    shell: Shell = ctx.obj
    if experts.without_effect:
        shell.note(f"bmoe: {experts.without_effect}")
    path = model_path(shell, flags.model)
    with shell.err.status("measuring") as status:
        report = measuring.measure(
            path, plan, on_stage=status.update, on_repetition=lambda text: shell.note(f"bmoe: {text}")
        )
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
