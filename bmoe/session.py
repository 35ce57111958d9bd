"""One engine, its kept state, and requests one after the other."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from bmoe import models
from bmoe.decide import Decider, DecideRequest, DecideResult, KeptPrefix, Refused
from bmoe.decide.backend import Backend, ChatMessage, PrefillOutcome
from bmoe.options import lettered
from bmoe_native import Engine
from bmoe_native.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    EngineError,
    EngineMemoryError,
    ForkedError,
    TemplateError,
    TooLongError,
)

PREFIX_CACHE_MODES = ("auto", "on", "off")


class SessionEngine(Backend, Protocol):
    """What a session needs of an engine beyond a decision's calls."""

    def cancel(self) -> None:
        """Stop the running prefill, or the next one. Any thread."""
        ...

    def clear_cancel(self) -> None:
        """Forget a cancel that came before this point."""
        ...

    def close(self) -> None: ...


class Session:
    """Decisions over one model. Requests from several threads are served one at a time."""

    def __init__(
        self,
        engine: SessionEngine,
        *,
        decide: bool = True,
        prefix_cache: str = "auto",
        system: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_prefix_cache(prefix_cache)
        self._engine = engine
        self._pid = os.getpid()
        self._system = system
        self._serving = threading.Lock()
        self._cancelling = threading.Lock()
        self._running = False
        self._ended: EngineError | None = None
        # On the CPU two pieces of a prompt cost about what they cost together, so auto keeps the state.
        kept = None if prefix_cache == "off" else KeptPrefix()
        self._decider = Decider(_RefusingBackend(engine), kept=kept, clock=clock) if decide else None

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        decide: bool = True,
        prefix_cache: str = "auto",
        system: str | None = None,
        chat_template: str | None = None,
        n_ctx: int = 0,
        n_ubatch: int = 0,
        n_threads: int = 0,
        cache: Path | None = None,
        on_fetch: models.Progress | None = None,
        on_load: Callable[[float], None] | None = None,
        on_log: Callable[[int, str], None] | None = None,
        log_level: int = 3,
    ) -> "Session":
        """Open a GGUF file, or a named model of bmoe.models, fetched into cache on first use; None: the default one.

        Raises: Refused, FetchError, EngineError.
        """
        check_prefix_cache(prefix_cache)
        path = models.resolve(model, cache or models.default_cache(), on_fetch)
        engine = Engine.open(
            path,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            chat_template=chat_template,
            on_log=on_log,
            log_level=log_level,
            on_progress=on_load,
        )
        return cls(engine, decide=decide, prefix_cache=prefix_cache, system=system)

    def decide(
        self,
        request: DecideRequest | None = None,
        *,
        prefix: str = "",
        suffix: str = "",
        choices: Sequence[str] = (),
        reuse_prefix: bool = True,
        system: str | None = None,
        template: bool = True,
    ) -> DecideResult:
        """Answer a request, given whole or by its fields.

        Raises: Refused and BadLogits, after which the session goes on; EngineError, after which it is over.
        """
        if request is None:
            request = DecideRequest(
                prefix=prefix,
                suffix=suffix,
                choices=choices,  # type: ignore[arg-type]  # checked and made a tuple by the request
                reuse_prefix=reuse_prefix,
                system=system,
                template=template,
            )
        elif prefix or suffix or choices:
            raise TypeError("give a request or its fields, not both")
        if self._decider is None:
            raise Refused("this session was opened without decisions")
        if request.system is None and self._system is not None and request.template:
            request = replace(request, system=self._system)
        with self._request():
            return self._decider.decide(request)

    def lettered(
        self,
        question: str,
        options: Sequence[str],
        *,
        reuse_prefix: bool = True,
        system: str | None = None,
        template: bool = True,
    ) -> DecideRequest:
        """A question with options as a request for decide(), its labels chosen for this model's vocabulary.

        Raises: Refused, ForkedError.
        """
        self._check_process()

        def tokenize(label: str) -> list[int]:
            return self._engine.text_tokens(label, add_bos=False)

        with self._serving:
            return lettered(question, options, tokenize, reuse_prefix=reuse_prefix, system=system, template=template)

    def cancel(self) -> None:
        """Stop the request being served; without one, nothing. Any thread.

        Raises: ForkedError.
        """
        self._check_process()
        with self._cancelling:
            if self._running:
                self._engine.cancel()

    def close(self) -> None:
        """Free the engine, stopping what runs. Closing twice is fine."""
        self._engine.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Serve one request: alone, and with cancels that are its own, neither lost nor left to the next."""
        self._check_process()
        with self._serving:
            if self._ended is not None:
                raise ClosedError(f"this session ended with an earlier error: {self._ended}") from self._ended
            with self._cancelling:
                self._engine.clear_cancel()
                self._running = True
            try:
                yield
            except (ArgumentError, BusyError):
                raise
            except EngineError as error:
                self._ended = error
                raise
            finally:
                with self._cancelling:
                    self._running = False

    def _check_process(self) -> None:
        """Before any lock: what a thread of the parent held at the fork is held for ever in the child.

        Raises: ForkedError.
        """
        if os.getpid() != self._pid:
            raise ForkedError("the session was opened before a fork: open one in this process")


class _RefusingBackend:
    """An engine whose errors about a request, not about itself, are refusals."""

    def __init__(self, engine: SessionEngine) -> None:
        self._engine = engine
        self.token_text = engine.token_text
        self.logits = engine.logits
        self.save_state = engine.save_state
        self.load_state = engine.load_state
        self.drop_state = engine.drop_state

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    def chat_tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        try:
            return self._engine.chat_tokens(messages)
        except (TemplateError, TooLongError, EngineMemoryError) as error:
            raise Refused(str(error)) from error

    def text_tokens(self, text: str, *, add_bos: bool) -> list[int]:
        try:
            return self._engine.text_tokens(text, add_bos=add_bos)
        except (TooLongError, EngineMemoryError) as error:
            raise Refused(str(error)) from error

    def prefill(self, tokens: Sequence[int]) -> PrefillOutcome:
        try:
            return self._engine.prefill(tokens)
        except TooLongError as error:
            raise Refused(str(error)) from error


def check_prefix_cache(mode: str) -> None:
    """Raises: Refused, for what is no mode."""
    if mode not in PREFIX_CACHE_MODES:
        raise Refused(f"prefix_cache must be one of {', '.join(PREFIX_CACHE_MODES)}, not {mode!r}")
