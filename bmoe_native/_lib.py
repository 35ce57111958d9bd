"""Find and load libbmoe, check its ABI, turn status codes into exceptions."""

import functools
from pathlib import Path
from typing import Any

from bmoe_native import errors

ERROR_TEXT_BYTES = 4096


def library_path() -> Path:
    """The library beside the generated declarations, by the name that holds the ABI they were made of."""
    from bmoe_native import _bmoe_cffi  # type: ignore[attr-defined, unused-ignore]

    abi = _bmoe_cffi.ffi.typeof("enum bmoe_abi").relements["BMOE_ABI_VERSION"]
    return Path(_bmoe_cffi.__file__).with_name(f"libbmoe.so.{abi}")


@functools.cache
def _cffi() -> tuple[Any, Any]:
    """(ffi, lib), loaded on first use so that importing bmoe loads no library."""
    try:
        from bmoe_native import _bmoe_cffi  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise errors.LibraryError(f"bmoe is not built here (pip install . builds it): {error}") from error
    ffi: Any = _bmoe_cffi.ffi
    path = library_path()
    try:
        library: Any = ffi.dlopen(str(path))
    except OSError as error:
        raise errors.LibraryError(f"cannot load {path}: {error}; pip install . builds it again") from error
    found, wanted = library.bmoe_abi_version(), library.BMOE_ABI_VERSION
    if found != wanted:
        raise errors.LibraryError(
            f"{path} has ABI {found}, this binding needs {wanted}: build it again (pip install .)"
        )
    return ffi, library


def ffi() -> Any:
    """cffi's FFI object for bmoe.h."""
    return _cffi()[0]


def lib() -> Any:
    """The loaded libbmoe."""
    return _cffi()[1]


def build_info() -> str:
    """Versions of bmoe and llama.cpp in the loaded library."""
    text: str = ffi().string(lib().bmoe_build_info()).decode()
    return text


@functools.cache
def _kinds() -> dict[int, type[errors.EngineError]]:
    c = lib()
    return {
        c.BMOE_E_ARGUMENT: errors.ArgumentError,
        c.BMOE_E_CLOSED: errors.ClosedError,
        c.BMOE_E_BUSY: errors.BusyError,
        c.BMOE_E_TOO_LONG: errors.TooLongError,
        c.BMOE_E_CANCELLED: errors.CancelledError,
        c.BMOE_E_MODEL: errors.ModelError,
        c.BMOE_E_MEMORY: errors.EngineMemoryError,
        c.BMOE_E_TEMPLATE: errors.TemplateError,
        c.BMOE_E_STATE: errors.StateError,
        c.BMOE_E_UNSUPPORTED: errors.UnsupportedError,
        c.BMOE_E_LOGITS: errors.LogitsError,
        c.BMOE_E_READ: errors.ReadError,
    }


def raise_status(status: int, text: str) -> None:
    """Raise the kind for a status other than BMOE_OK."""
    raise _kinds().get(status, errors.EngineError)(text)


def check(status: int, handle: Any) -> int:
    """The status itself when it is no failure, else its exception with the engine's text."""
    if status < 0:
        raise_status(status, ffi().string(lib().bmoe_last_error(handle)).decode("utf-8", "replace"))
    return status
