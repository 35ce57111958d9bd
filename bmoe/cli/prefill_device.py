"""The prefill device: the flags, and what is said of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from bmoe.prefill_device import DEFAULT_MIN_TOKENS, check_prefill_device
from bmoe_native.types import Info

MIB = 2**20

PrefillDeviceFlag = Annotated[
    str | None, typer.Option("--prefill-device", metavar="NAME", help="Computes wide prompts; see bmoe devices.")
]
PrefillMinTokensFlag = Annotated[
    int | None,
    typer.Option("--prefill-min-tokens", metavar="N", min=0, max=65536, help="Narrower ones: on the CPU; 0: 32."),
]
PrefillLoadersFlag = Annotated[
    int | None,
    typer.Option("--prefill-loaders", metavar="N", min=0, max=64, help="That bring weights to the device; 0: 2."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFlags:
    """What was typed; None where nothing was.

    Raises: Refused, for a device that is never one.
    """

    prefill_device: PrefillDeviceFlag = None
    prefill_min_tokens: PrefillMinTokensFlag = None
    prefill_loaders: PrefillLoadersFlag = None

    def __post_init__(self) -> None:
        check_prefill_device(self.name, self.prefill_min_tokens or 0)

    @property
    def name(self) -> str:
        return self.prefill_device or ""

    @property
    def min_tokens(self) -> int:
        return self.prefill_min_tokens or DEFAULT_MIN_TOKENS

    @property
    def without_effect(self) -> str:
        """What is to be said of flags that do nothing; empty where there are none."""
        others = {"--prefill-min-tokens": self.prefill_min_tokens, "--prefill-loaders": self.prefill_loaders}
        typed = [flag for flag, value in others.items() if value is not None]
        if self.name or not typed:
            return ""
        return f"{' and '.join(typed)} {'does' if len(typed) == 1 else 'do'} nothing without --prefill-device"


def opened(info: Info, flags: DeviceFlags, *, in_detail: bool) -> Iterator[str]:
    """What is to be said of a model that was opened with these flags."""
    if info.prefill_device_why:
        yield f"prefill runs on the CPU: {info.prefill_device_why}"
    elif info.prefill_device and in_detail:
        yield (
            f"pieces of {flags.min_tokens} tokens and more are computed on {info.prefill_device}, "
            f"of whose memory two layers take {info.prefill_device_bytes // MIB} MiB"
        )
