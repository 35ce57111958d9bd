"""An engine without a library, for sessions and commands."""

import threading
from collections.abc import Sequence
from typing import Any

from bmoe.decide.backend import ChatMessage
from bmoe_native.errors import ClosedError, TemplateError
from bmoe_native.types import Info
from tests.decide.scripted import Outcome, ScriptedBackend

INFO = Info(
    arch="qwen3moe",
    name="Scripted",
    quantization="Q4_K - Medium",
    n_params=30_500_000_000,
    weights_bytes=18_000_000_000,
    experts_bytes=17_000_000_000,
    n_layer=48,
    n_moe_layer=47,
    n_expert=128,
    n_expert_used=8,
    n_embd=2048,
    n_vocab=4096,
    n_ctx_train=32768,
    n_swa=0,
    n_shards=2,
    n_ctx=4096,
    n_ubatch=512,
    n_threads=2,
    kv_type="f16",
    is_recurrent=False,
    is_hybrid=False,
    has_template=True,
    adds_bos=False,
    think_ctl="switch",
    think_start="<think>",
    think_end="</think>",
)


class ScriptedEngine(ScriptedBackend):
    """A scripted backend with cancels that stick, as the real one's do; `hold` makes prefills wait for `go`."""

    def __init__(self, *, info: Info = INFO, **backend: Any) -> None:
        super().__init__(**backend)
        self.info = info
        self.closed = False
        self.cancelled = threading.Event()
        self.computing = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self._one_call = threading.Lock()

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self.has_template:
            raise TemplateError("the model has no chat template")
        return super().chat_tokens(messages)

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        if self.closed:
            raise ClosedError("the engine is closed")
        return super().text_tokens(text, add_bos=add_bos)

    def prefill(self, tokens: Sequence[int]) -> Outcome:
        assert self._one_call.acquire(blocking=False), "two calls at once"
        try:
            self.computing.set()
            while not self.go.wait(0.001):
                if self.cancelled.is_set():
                    break
            if self.cancelled.is_set():
                self.cancelled.clear()
                return Outcome(cancelled=True, n_tokens=0)
            return super().prefill(tokens)
        finally:
            self._one_call.release()

    def cancel(self) -> None:
        self.cancelled.set()

    def clear_cancel(self) -> None:
        self.cancelled.clear()

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
