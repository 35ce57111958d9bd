"""bmoe devices"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.cli.render import printable
from bmoe.cli.shell import Shell
from bmoe.prefill_device import TYPES
from bmoe_native.types import Device

MIB = 2**20


def devices(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What this build can compute on, with the memory of each.

    Those of type gpu and igpu can be a --prefill-device.
    """
    shell: Shell = ctx.obj
    found = shell.devices()
    if as_json:
        shell.emit({"devices": [{**asdict(device), "is_prefill": device.type in TYPES} for device in found]})
        return
    shell.out.print(listed(found))
    if not any(device.type in TYPES for device in found):
        shell.note("bmoe: none of them can be a --prefill-device: that takes a gpu or igpu, and a build that knows it")


def listed(found: Sequence[Device]) -> RenderableType:
    """A line per device."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for device in found:
        cells = (printable(device.name), device.type, _memory(device), printable(device.description))
        table.add_row(*map(Text, cells))
    return table


def _memory(device: Device) -> str:
    if not device.total_bytes:
        return "memory unknown"
    return f"{device.free_bytes // MIB} of {device.total_bytes // MIB} MiB free"
