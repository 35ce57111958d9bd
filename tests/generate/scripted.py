"""A model that answers from a script: bytes are tokens, 256 and up are control tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bmoe.decide.backend import ChatMessage
from bmoe.decide.reads import Reads
from bmoe.generate import Sampling, TurnPrompt

END, USER, ASSISTANT, SYSTEM, TOOL = 256, 257, 258, 259, 260
NAMES = {END: "<end>", USER: "<user>", ASSISTANT: "<assistant>", SYSTEM: "<system>", TOOL: "<tool>"}
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}


@dataclass
class Outcome(Reads):
    cancelled: bool
    n_tokens: int
    prefill_s: float = 1.0
    prefill_cpu_s: float = 2.0
    n_major_faults: int = 3


class ScriptedWriter:
    """`script` gives what is written after a state of so many tokens, as bytes or tokens."""

    def __init__(
        self,
        script: Sequence[int] = b"hello",
        *,
        n_ctx: int = 1000,
        can_cut: bool = True,
        tags: tuple[str, str] = ("", ""),
        opens: bytes = b"",
        cancel_at: int | None = None,
    ) -> None:
        self.script = [*script, END]
        self.n_ctx = n_ctx
        self.can_cut = can_cut
        self.reasoning_tags = tags
        self.opens = opens
        self.cancel_at = cancel_at
        self.state: list[int] = []
        self.calls: list[tuple[str, int]] = []
        self.written = 0
        self.n_prefills = 0
        self.samplings: list[Sampling] = []
        self.rendered: list[ChatMessage] = []
        self.during_prefill: Callable[[], None] = lambda: None
        self.reads: dict[str, int | float] = {}  # of each prefill
        self.cache_resident_mib = 0.0
        self.cache_budget_mib = 0.0

    @property
    def position(self) -> int:
        return len(self.state)

    def turn_prompt(self, messages: Sequence[ChatMessage], *, think: bool) -> TurnPrompt:
        self.rendered = list(messages)
        tokens: list[int] = []
        for role, content in messages:
            tokens += [ROLES[role], *content.encode(), END]
        opens = self.opens if think else b""
        return TurnPrompt(tokens=[*tokens, ASSISTANT, *opens], in_reasoning=bool(opens))

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return NAMES[token].encode() if token in NAMES else bytes([token])

    def is_control(self, token: int) -> bool:
        return token in NAMES

    def ends_turn(self, token: int) -> bool:
        return token == END

    def prefill(self, tokens: Sequence[int]) -> Outcome:
        assert tokens and self.position + len(tokens) <= self.n_ctx
        index, self.n_prefills = self.n_prefills, self.n_prefills + 1
        self.during_prefill()
        if index == self.cancel_at:
            if not self.can_cut:
                self.state = []
            self.calls.append(("cancelled", len(tokens)))
            return Outcome(cancelled=True, n_tokens=0)
        self.calls.append(("prefill", len(tokens)))
        self.state += tokens
        return Outcome(cancelled=False, n_tokens=len(tokens), **self.reads)

    def start_sampling(self, sampling: Sampling) -> None:
        self.samplings.append(sampling)
        self.written = 0

    def sample(self) -> int:
        token = self.script[min(self.written, len(self.script) - 1)]
        self.written += 1
        return token

    def drop_state(self) -> None:
        self.state = []
        self.calls.append(("drop", 0))

    def cut_state(self, n_tokens: int) -> bool:
        if not self.can_cut:
            return False
        del self.state[n_tokens:]
        self.calls.append(("cut", n_tokens))
        return True
