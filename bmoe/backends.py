"""An engine as the policies want it: its errors about a request are refusals, and whose state it holds is known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from bmoe.decide import BadLogits, Refused
from bmoe.decide.backend import ChatMessage, Float32Array, State
from bmoe.decide.prefix import MIB
from bmoe.generate import Sampling, TurnPrompt
from bmoe.generate.backend import DecodeOutcome
from bmoe_native.errors import EngineMemoryError, LogitsError, TemplateError, TooLongError, UnsupportedError
from bmoe_native.types import TOKEN_CONTROL, TOKEN_END, Counters, Info, PrefillResult, Prompt


class SessionEngine(Protocol):
    """What a session needs of bmoe_native.Engine."""

    @property
    def info(self) -> Info: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    def render(self, messages: Sequence[ChatMessage], *, reasoning: bool = ...) -> Prompt: ...
    def tokenize(self, text: Prompt, *, add_bos: bool) -> list[int]: ...
    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]: ...
    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]: ...
    def detokenize(self, tokens: Sequence[int], *, special: bool = ...) -> bytes: ...
    def token_text(self, token: int) -> str: ...
    def token_attr(self, token: int) -> int: ...
    def prefill(self, tokens: Sequence[int]) -> PrefillResult: ...
    def prefill_rows(self, tokens: Sequence[int]) -> tuple[PrefillResult, Float32Array]: ...
    def logits(self) -> Float32Array: ...
    def head_logits(self, states: Float32Array, tokens: Sequence[int]) -> Float32Array: ...
    def start_sampling(self, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None: ...
    def sample(self) -> int: ...
    def save_state(self) -> State: ...
    def load_state(self, state: State) -> None: ...
    def keep_state(self, n_tokens: int) -> None: ...
    def drop_state(self) -> None: ...
    def set_cache(self, n_bytes: int) -> None: ...
    def counters(self) -> Counters: ...
    def cancel(self) -> None:
        """Stop the running prefill, or the next one. Any thread."""
        ...

    def clear_cancel(self) -> None:
        """Forget a cancel that came before this point."""
        ...

    def close(self) -> None: ...


@contextmanager
def _as_refusals() -> Iterator[None]:
    """What an engine says of a text is about the request, not about itself."""
    try:
        yield
    except (TemplateError, TooLongError, EngineMemoryError) as error:
        raise Refused(str(error)) from error


class DecidingBackend:
    """For a decision and for perplexity, which begin by making the state their own: before_change is called then."""

    def __init__(self, engine: SessionEngine, before_change: Callable[[], None]) -> None:
        self._engine = engine
        self._before_change = before_change
        self.token_text = engine.token_text
        self.logits = engine.logits
        self.save_state = engine.save_state

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def max_rows(self) -> int:
        return self._engine.max_rows

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        with _as_refusals():
            return self._engine.chat_tokens(messages)

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        with _as_refusals():
            return self._engine.text_tokens(text, add_bos=add_bos)

    def load_state(self, state: State) -> None:
        self._before_change()
        self._engine.load_state(state)

    def drop_state(self) -> None:
        self._before_change()
        self._engine.drop_state()

    def prefill(self, tokens: Sequence[int]) -> PrefillResult:
        try:
            return self._engine.prefill(tokens)
        except TooLongError as error:
            raise Refused(str(error)) from error

    def prefill_rows(self, tokens: Sequence[int]) -> tuple[PrefillResult, Float32Array]:
        return self._engine.prefill_rows(tokens)


class GeneratingBackend:
    """For the turns of a conversation, whose state it is."""

    def __init__(self, engine: SessionEngine) -> None:
        self._engine = engine
        self._cache_budget_bytes = engine.info.cache_bytes
        self.drop_state = engine.drop_state

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def position(self) -> int:
        return self._engine.position

    @property
    def reasoning_tags(self) -> tuple[str, str]:
        return self._engine.info.think_start, self._engine.info.think_end

    @property
    def cache_resident_mib(self) -> float:
        return self._engine.counters().resident_bytes / MIB if self._engine.info.is_streamed else 0.0

    @property
    def cache_budget_mib(self) -> float:
        return self._cache_budget_bytes / MIB

    def set_cache_budget(self, n_bytes: int) -> None:
        """Raises: Refused, where nothing streams."""
        try:
            self._engine.set_cache(n_bytes)
        except UnsupportedError as error:
            raise Refused(str(error)) from error
        self._cache_budget_bytes = n_bytes

    def turn_prompt(self, messages: Sequence[ChatMessage], *, think: bool) -> TurnPrompt:
        with _as_refusals():
            prompt = self._engine.render(messages, reasoning=think)
            tokens = self._engine.tokenize(prompt, add_bos=True)
        return TurnPrompt(tokens=tokens, in_reasoning=self._opens_reasoning(prompt))

    def _opens_reasoning(self, prompt: Prompt) -> bool:
        """Whether what the template wrote after the last message opens reasoning and does not close it."""
        start, end = self.reasoning_tags
        tail = prompt.text[prompt.spans[-1][1] if prompt.spans else 0 :].decode("utf-8", "replace")
        return bool(start) and tail.rfind(start) > tail.rfind(end)

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        with _as_refusals():
            return self._engine.text_tokens(text, add_bos=add_bos)

    def token_bytes(self, token: int) -> bytes:
        return self._engine.detokenize([token], special=True)

    def is_control(self, token: int) -> bool:
        return bool(self._engine.token_attr(token) & TOKEN_CONTROL)

    def ends_turn(self, token: int) -> bool:
        return bool(self._engine.token_attr(token) & TOKEN_END)

    def prefill(self, tokens: Sequence[int]) -> DecodeOutcome:
        return self._engine.prefill(tokens)

    def start_sampling(self, sampling: Sampling) -> None:
        self._engine.start_sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        )

    def sample(self) -> int:
        try:
            return self._engine.sample()
        except LogitsError as error:
            raise BadLogits(str(error)) from error

    def cut_state(self, n_tokens: int) -> bool:
        try:
            self._engine.keep_state(n_tokens)
        except UnsupportedError:
            return False
        return True
