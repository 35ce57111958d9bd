"""Python callables as C hooks: what they raise stops the call and is raised again from it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from bmoe_native._lib import ffi
from bmoe_native.types import Float32Array, Routing


class Hooks:
    """The callbacks of one engine, alive as long as it is.

    Ctrl-C needs no code of its own: entering a hook on the main thread lets Python's signal handler run, which raises
    there.
    """

    def __init__(
        self,
        on_log: Callable[[int, str], None] | None,
        on_progress: Callable[[float], None] | None,
        on_routing: Callable[[Routing], None] | None,
        on_layer: Callable[[int, Float32Array], None] | None,
    ) -> None:
        self._raised: BaseException | None = None
        self._on_log = on_log
        self._on_progress = on_progress
        self._on_routing = on_routing
        self._on_layer = on_layer
        f = ffi()
        self.log = f.callback("bmoe_log_fn", self._log, onerror=self._failed) if on_log else f.NULL
        self.progress = f.callback("bmoe_progress_fn", self._progress, error=1, onerror=self._failed)
        self.poll = f.callback("bmoe_poll_fn", self._poll, error=1, onerror=self._failed)
        self.routing = f.callback("bmoe_router_fn", self._routing, onerror=self._failed) if on_routing else f.NULL
        self.layer = f.callback("bmoe_layer_fn", self._layer, onerror=self._failed) if on_layer else f.NULL

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

    def _routing(self, raw: Any, _user: object) -> None:
        if self._on_routing is None or self._raised is not None:
            return
        shape = (raw.n_tokens, raw.n_used)

        def array(pointer: Any, kind: type[np.generic]) -> Any:
            n_bytes = shape[0] * shape[1] * np.dtype(kind).itemsize
            return np.frombuffer(ffi().buffer(pointer, n_bytes), kind).reshape(shape).copy()

        routing = Routing(
            layer=raw.layer,
            n_expert=raw.n_expert,
            experts=array(raw.experts, np.int32),
            weights=array(raw.weights, np.float32),
            residency=None if raw.residency == ffi().NULL else array(raw.residency, np.uint8),
            expert_bytes=raw.expert_bytes,
        )
        self._on_routing(routing)

    def _layer(self, layer: int, state: Any, n_embd: int, _user: object) -> None:
        if self._on_layer is None or self._raised is not None:
            return
        self._on_layer(layer, np.frombuffer(ffi().buffer(state, n_embd * 4), np.float32).copy())

    def _poll(self, _user: object) -> int:
        return 0 if self._raised is None else 1
