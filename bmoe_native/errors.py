"""Exceptions by kind, one for each status a caller would act differently on."""


class EngineError(Exception):
    """What the engine could not do, in its own words. Only closing it makes sense after a plain EngineError."""


class ArgumentError(EngineError, ValueError):
    """An argument outside what the call documents. Nothing changed."""


class ClosedError(EngineError):
    """The engine is closed."""


class ForkedError(ClosedError):
    """The engine was opened in a parent process; a forked child must open its own."""


class BusyError(EngineError):
    """Another thread's call is running on this engine. Nothing changed."""


class TooLongError(EngineError):
    """More tokens than the context has room for. Nothing changed."""


class CancelledError(EngineError):
    """Loading was cancelled. (A cancelled prefill is a result, not an error.)"""


class ModelError(EngineError):
    """The file is missing, damaged, or no language model that can be run here."""


class EngineMemoryError(EngineError, MemoryError):
    """Not enough memory."""


class TemplateError(EngineError):
    """No chat template, or it refused the messages, or reasoning cannot be turned off. Nothing changed."""


class StateError(EngineError):
    """A saved state that does not belong here, or no logits to read yet."""


class LogitsError(EngineError):
    """The logits are no distribution: the model or its file is broken. Nothing changed."""


class ReadError(EngineError):
    """An expert could not be read from the model's file. The state is as after a cancel."""


class UnsupportedError(EngineError):
    """This model's memory cannot do that, or this CPU lacks what the library was compiled for. Nothing changed."""


class LibraryError(ImportError):
    """libbmoe is missing, or of another ABI than this binding."""
