"""Python callables as C hooks: what they raise stops the call and is raised again from it."""

from collections.abc import Callable
from typing import Any

from bmoe_native._lib import ffi


class Hooks:
    """The callbacks of one engine, alive as long as it is.

    Ctrl-C needs no code of its own: entering a hook on the main thread lets Python's signal handler run, which raises
    there.
    """

    def __init__(self, on_log: Callable[[int, str], None] | None, on_progress: Callable[[float], None] | None) -> None:
        self._raised: BaseException | None = None
        self._on_log = on_log
        self._on_progress = on_progress
        f = ffi()
        self.log = f.callback("bmoe_log_fn", self._log, onerror=self._failed) if on_log else f.NULL
        self.progress = f.callback("bmoe_progress_fn", self._progress, error=1, onerror=self._failed)
        self.poll = f.callback("bmoe_poll_fn", self._poll, error=1, onerror=self._failed)

    def reraise(self) -> None:
        """Raise what a hook raised during the call that just ended."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _failed(self, _kind: type[BaseException], raised: BaseException, _trace: object) -> None:
        self._raised = raised

    def _log(self, level: int, text: Any, _user: object) -> None:
        if self._on_log is not None:
            self._on_log(level, ffi().string(text).decode("utf-8", "replace"))

    def _progress(self, fraction: float, _user: object) -> int:
        if self._on_progress is not None:
            self._on_progress(fraction)
        return 0

    def _poll(self, _user: object) -> int:
        return 0 if self._raised is None else 1
