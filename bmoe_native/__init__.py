"""libbmoe from Python: codes become exceptions, lifetimes are owned. Importing loads no library."""

from bmoe_native._lib import build_info
from bmoe_native.engine import Engine, devices
from bmoe_native.errors import (
    ArgumentError,
    BusyError,
    CancelledError,
    ClosedError,
    EngineError,
    EngineMemoryError,
    ForkedError,
    LibraryError,
    LogitsError,
    ModelError,
    ReadError,
    StateError,
    TemplateError,
    TooLongError,
    UnsupportedError,
)
from bmoe_native.types import Counters, Device, Head, Info, PrefillResult, Prompt, Routing, Streaming

__all__ = [
    "ArgumentError",
    "BusyError",
    "CancelledError",
    "ClosedError",
    "Counters",
    "Device",
    "Engine",
    "EngineError",
    "EngineMemoryError",
    "ForkedError",
    "Head",
    "Info",
    "LibraryError",
    "LogitsError",
    "ModelError",
    "PrefillResult",
    "Prompt",
    "ReadError",
    "Routing",
    "StateError",
    "Streaming",
    "TemplateError",
    "TooLongError",
    "UnsupportedError",
    "build_info",
    "devices",
]
