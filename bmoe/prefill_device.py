"""The prefill device of a session: what can be asked for, and what it means for the prefix cache."""

from bmoe.decide import Refused
from bmoe.decide.types import check_text
from bmoe_native.types import Info

DEFAULT_MIN_TOKENS = 32  # what 0 stands for
TYPES = ("gpu", "igpu")  # of devices that can be one


def check_prefill_device(name: str, min_tokens: int = 0) -> None:
    """What is wrong with it whatever devices there are.

    Raises: Refused.
    """
    check_text("prefill_device", name)
    if name.strip().lower().startswith("rpc"):
        raise Refused(
            f"prefill_device {name!r} is an endpoint of ggml's RPC, and none is opened: it has neither encryption nor "
            "passwords, and this process would have to trust whatever answers there"
        )
    if name and min_tokens == 1:
        raise Refused(
            "prefill_min_tokens is 1, with which each generated token would wait for all weights to reach the device: "
            "give 2 or more, or 0 for 32"
        )


def keeps_prefix(prefix_cache: str, info: Info) -> bool:
    """Whether the state after a prefix is kept. On the CPU two pieces of a prompt cost about what they cost together.

    Raises: Refused, for what costs more than it saves.
    """
    if not info.prefill_device:
        return prefix_cache != "off"
    if prefix_cache == "on":
        raise Refused(
            f"prefix_cache on cannot be had with the prefill device {info.prefill_device}: each piece of a prompt "
            "brings the weights there anew, and a kept prefix makes two pieces of one; auto is off with a device"
        )
    return False
