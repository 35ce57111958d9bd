"""An engine without a library, for sessions and commands."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from bmoe.decide.backend import ChatMessage, Float32Array
from bmoe_native.errors import ClosedError, TemplateError, UnsupportedError
from bmoe_native.types import TOKEN_CONTROL, TOKEN_END, Counters, Info, PrefillResult, Prompt
from tests.decide.scripted import ASSISTANT, N_SPECIAL, N_VOCAB, SYSTEM, USER, Outcome, ScriptedBackend

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

END = N_VOCAB - 1  # the token that ends a turn
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class ScriptedEngine(ScriptedBackend):
    """A scripted backend with cancels that stick, as the real one's do; `hold` makes prefills wait for `go`.

    It says the tokens of `script`, one turn's after the other's, and ends the turn where they are used up; without a
    script, what its logits favour.
    """

    max_rows = 16

    def __init__(
        self, *, info: Info = INFO, script: Sequence[Sequence[str | bytes]] | None = None, **backend: Any
    ) -> None:
        super().__init__(**backend)
        self.script = script
        self.sampling: list[dict[str, Any]] = []  # of each turn
        self.spelled: dict[int, bytes] = {END: b"<end>"}
        self.left: list[int] = []
        self.info = info
        self.closed = False
        self.cache_bytes = info.cache_bytes
        self.resident_bytes = 0
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

    def render(self, messages: Sequence[ChatMessage], *, reasoning: bool = False) -> Prompt:
        """Each role is the byte that is its token, and reasoning is opened by its tag."""
        if not self.has_template:
            raise TemplateError("the model has no chat template")
        text, spans = b"", []
        for role, content in messages:
            text += bytes([ROLES[role]])
            spans.append((len(text), len(text) + len(content.encode())))
            text += content.encode()
        tail = self.info.think_start.encode() if reasoning else b""
        return Prompt(text=text + bytes([ASSISTANT]) + tail, spans=tuple(spans))

    def tokenize(self, text: Prompt, *, add_bos: bool) -> list[int]:
        tokens = self.text_tokens("", add_bos=add_bos)
        at = 0
        for begin, end in (*text.spans, (len(text.text), len(text.text))):
            tokens += text.text[at:begin]
            tokens += self.text_tokens(text.text[begin:end].decode(), add_bos=False)
            at = end
        return tokens

    def token_attr(self, token: int) -> int:
        return TOKEN_END | TOKEN_CONTROL if token == END else TOKEN_CONTROL if token < N_SPECIAL else 0

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.spelled.get(token) or self.token_text(token).encode() for token in tokens)

    def start_sampling(self, **how: Any) -> None:
        self.sampling.append(how)
        turn = len(self.sampling) - 1
        self.left = []
        for number, word in enumerate(self.script[turn] if self.script and turn < len(self.script) else ()):
            token = END - 1 - turn * 64 - number
            self.spelled[token] = word if isinstance(word, bytes) else word.encode()
            self.left.append(token)

    def sample(self) -> int:
        if self.script is None:
            return int(np.argmax(self.logits()))
        return self.left.pop(0) if self.left else END

    def prefill_rows(self, tokens: Sequence[int]) -> tuple[PrefillResult, Float32Array]:
        assert len(tokens) <= self.max_rows, "more rows than there is room for"
        before = self.pieces
        outcome = self.prefill(tokens)
        rows = [self._logits((*before, tuple(tokens[: count + 1]))) for count in range(len(tokens))]
        return outcome, np.stack(rows)

    def keep_state(self, n_tokens: int) -> None:
        kept: list[tuple[int, ...]] = []
        for piece in self.pieces:
            kept.append(piece[: n_tokens - sum(map(len, kept))])
        self.pieces = tuple(filter(None, kept))

    def prefill(self, tokens: Sequence[int]) -> PrefillResult:
        assert self._one_call.acquire(blocking=False), "two calls at once"
        try:
            self.computing.set()
            while not self.go.wait(0.001):
                if self.cancelled.is_set():
                    break
            if self.cancelled.is_set():
                self.cancelled.clear()
                return told(Outcome(cancelled=True, n_tokens=0))
            return told(super().prefill(tokens))
        finally:
            self._one_call.release()

    def set_cache(self, n_bytes: int) -> None:
        if not self.info.is_streamed:
            raise UnsupportedError("nothing streams in this engine, so that there is no cache")
        self.cache_bytes = n_bytes

    def counters(self) -> Counters:
        zeros = {field.name: 0 for field in dataclasses.fields(Counters)}
        return Counters(**{**zeros, "resident_bytes": self.resident_bytes})

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


def told(outcome: Outcome) -> PrefillResult:
    """A scripted prefill as the engine tells it."""
    return PrefillResult(n_major_faults=0, **dataclasses.asdict(outcome))
