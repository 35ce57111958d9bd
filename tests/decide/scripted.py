"""A backend without a model: its logits are a pure function of its state."""

import re
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bmoe.decide.backend import ChatMessage, Float32Array, State
from bmoe.decide.reads import Reads
from bmoe.decide.types import Refused

N_VOCAB = 4096
BOS, SYSTEM, USER, ASSISTANT = 0, 1, 2, 3
N_SPECIAL = 4
Pieces = tuple[tuple[int, ...], ...]


@dataclass
class Outcome(Reads):
    cancelled: bool
    n_tokens: int
    prefill_s: float = 1.0
    prefill_cpu_s: float = 2.0


class Saved(bytearray):
    """A saved state whose lifetime can be watched."""


class ScriptedBackend:
    """Words (with a blank before them), blanks and signs are tokens; the state is the pieces it was computed in.

    Pieces, not tokens, since a real prompt in other pieces rounds differently.

    `calls` is every call that touches the state; `cancel_at` and `fail_at` are counts of prefills, from 0.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 4096,
        bos: bool = False,
        strip: bool = False,
        has_template: bool = True,
        cancel_at: int | None = None,
        fail_at: int | None = None,
        logits: Callable[[Pieces], Float32Array] | None = None,
    ) -> None:
        self.n_ctx = n_ctx
        self.bos = bos
        self.strip = strip
        self.has_template = has_template
        self.cancel_at = cancel_at
        self.fail_at = fail_at
        self.pieces: Pieces = ()
        self.calls: list[tuple[str, int]] = []
        self.n_prefills = 0
        self.alive: list[weakref.ref[Saved]] = []
        self.words: dict[int, str] = {}
        self.during_prefill: Callable[[], None] = lambda: None
        self.reads: dict[str, int | float] = {}  # of each prefill
        self._logits = logits or self._hashed

    @property
    def position(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def n_computed(self) -> int:
        return sum(count for call, count in self.calls if call == "prefill")

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        tokens = [BOS] if add_bos and self.bos else []
        for word in re.findall(r" ?\w+|\s|[^\w\s]", text):
            token = N_SPECIAL + zlib.crc32(word.encode()) % (N_VOCAB - N_SPECIAL)
            self.words[token] = word
            tokens.append(token)
        return tokens

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        if not self.has_template:
            raise Refused("the model has no chat template")
        tokens = [BOS] if self.bos else []
        for role, content in messages:
            tokens.append({"system": SYSTEM, "user": USER, "assistant": ASSISTANT}[role])
            tokens += self.text_tokens(content.strip() if self.strip else content, add_bos=False)
        return [*tokens, ASSISTANT]

    def token_text(self, token: int) -> str:
        return self.words.get(token, f"<{token}>")

    def prefill(self, tokens: Sequence[int]) -> Outcome:
        assert tokens, "a prefill of nothing"
        assert self.position + len(tokens) <= self.n_ctx, "a prefill past the context"
        index, self.n_prefills = self.n_prefills, self.n_prefills + 1
        self.during_prefill()
        if index == self.fail_at:
            raise OSError("the disk went away")
        if index == self.cancel_at:
            self.calls.append(("cancelled", len(tokens)))
            return Outcome(cancelled=True, n_tokens=0)
        self.calls.append(("prefill", len(tokens)))
        self.pieces += (tuple(tokens),)
        return Outcome(cancelled=False, n_tokens=len(tokens), **self.reads)

    def logits(self) -> Float32Array:
        return self._logits(self.pieces)

    def save_state(self) -> State:
        assert not [ref for ref in self.alive if ref() is not None], "two states at once"
        text = ";".join(",".join(map(str, piece)) for piece in self.pieces)
        saved = Saved(text.encode())
        self.alive = [weakref.ref(saved)]
        self.calls.append(("save", self.position))
        return saved

    def load_state(self, state: State) -> None:
        self.pieces = tuple(tuple(map(int, piece.split(","))) for piece in bytes(state).decode().split(";"))
        self.calls.append(("load", self.position))

    def drop_state(self) -> None:
        self.pieces = ()
        self.calls.append(("drop", 0))

    @staticmethod
    def _hashed(pieces: Pieces) -> Float32Array:
        seed = zlib.crc32(repr(pieces).encode())
        return np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)
