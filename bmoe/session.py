"""One engine, its kept state, and requests one after the other."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from bmoe import models
from bmoe.aside import Aside
from bmoe.backends import DecidingBackend, GeneratingBackend, SessionEngine
from bmoe.decide import Decider, DecideRequest, DecideResult, KeptPrefix, Refused
from bmoe.decide.perplexity import OnScored, Perplexity, PerplexityRequest, PerplexityResult
from bmoe.generate import GenerateRequest, GenerateResult, Generator, Step
from bmoe.generate.types import check_whole
from bmoe.options import lettered
from bmoe.prefill_device import check_prefill_device, keeps_prefix
from bmoe.probe import Probe
from bmoe.route_trace import RouteTrace
from bmoe_native import Engine
from bmoe_native.errors import ArgumentError, BusyError, ClosedError, EngineError, ForkedError
from bmoe_native.types import Info, Routing, Streaming

PREFIX_CACHE_MODES = ("auto", "on", "off")
MAX_BYTES = 2**63 - 1


class Session:
    """One model that decides, generates and scores. Requests from several threads are served one at a time.

    A decision leaves a conversation as it found it: its state is put aside, and is back for the next turn.

    Raises: Refused, for a prefix cache that is no mode, or on with a prefill device.
    """

    def __init__(
        self,
        engine: SessionEngine,
        *,
        decide: bool = True,
        prefix_cache: str = "auto",
        system: str | None = None,
        route_trace: RouteTrace | None = None,
        probe: Probe | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_prefix_cache(prefix_cache)
        self._engine = engine
        self._pid = os.getpid()
        self._system = system
        self._route_trace = route_trace
        self._probe = probe
        self._serving = threading.Lock()
        self._cancelling = threading.Lock()
        self._running = False
        self._ended: EngineError | None = None
        self._kept = KeptPrefix() if keeps_prefix(prefix_cache, engine.info) and decide else None
        self._generating = GeneratingBackend(engine)
        self._generator = Generator(self._generating, clock=clock)
        self._aside = Aside(engine, self._generator.conversation)
        deciding = DecidingBackend(engine, self._aside.put)
        self._decider = Decider(deciding, kept=self._kept, clock=clock) if decide else None
        self._perplexity = Perplexity(deciding)

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
        streaming: Streaming | None = None,
        repack: bool = True,
        n_expert_used: int = 0,
        prefill_device: str = "",
        prefill_min_tokens: int = 0,
        prefill_loaders: int = 0,
        route_trace: RouteTrace | None = None,
        probe: Probe | None = None,
        cache: Path | None = None,
        on_fetch: models.Progress | None = None,
        on_load: Callable[[float], None] | None = None,
        on_log: Callable[[int, str], None] | None = None,
        log_level: int = 3,
    ) -> "Session":
        """Open a GGUF file, or a named model of bmoe.models, fetched into cache on first use; None: the default one.

        With streaming, routed experts stay in the file: docs/streaming.md. repack False computes with weights as they
        lie in the file, which other kernels do, so that last bits differ; streamed experts always are. n_expert_used
        above 0 takes so many experts per token in place of the file's number, which makes it another model.
        prefill_device computes the wide pieces of prompts: docs/prefill-device.md. What tokens are routed to is written
        to route_trace, which stays the caller's to close. probe is told how each decision came about: docs/probe.md.

        Raises: Refused, FetchError, EngineError.
        """
        check_prefix_cache(prefix_cache)
        check_prefill_device(prefill_device, prefill_min_tokens)
        path = models.resolve(model, cache or models.default_cache(), on_fetch)
        engine = Engine.open(
            path,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            chat_template=chat_template,
            streaming=streaming,
            repack=repack,
            n_expert_used=n_expert_used,
            prefill_device=prefill_device,
            prefill_min_tokens=prefill_min_tokens,
            prefill_loaders=prefill_loaders,
            on_log=on_log,
            log_level=log_level,
            on_progress=on_load,
            on_routing=_all_of([watcher.routed for watcher in (route_trace, probe) if watcher is not None]),
            on_layer=probe.layer_ended if probe is not None else None,
        )
        try:
            return cls(
                engine, decide=decide, prefix_cache=prefix_cache, system=system, route_trace=route_trace, probe=probe
            )
        except Refused:
            engine.close()
            raise

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
            decide = partial(self._decider.decide, request)
            return decide() if self._probe is None else self._probe.observe(self._engine, decide)

    def generate(self, request: GenerateRequest, on_step: Callable[[Step], None] | None = None) -> GenerateResult:
        """Answer one turn of a conversation; on_step is called with each token. The kept prefix state is let go.

        Raises: Refused and BadLogits, after which the session goes on; EngineError, after which it is over; what
        on_step raises, after which the turn is forgotten.
        """
        with self._request():
            begins = request.clear_kv or not self._generator.conversation.messages
            if begins and request.template and request.system is None and self._system is not None:
                request = replace(request, system=self._system, clear_kv=True)
            turn = self._generator.prepare(request)
            if self._kept is not None:
                self._kept.drop()
            if turn.request.clear_kv:
                self._aside.drop()
            else:
                self._aside.take_back()

            def stepped(step: Step) -> None:
                if self._route_trace is not None:
                    self._route_trace.sampled()
                if on_step is not None:
                    on_step(step)

            return self._generator.generate(turn, stepped)

    def perplexity(
        self, request: PerplexityRequest | str, on_scored: OnScored = lambda scored: None
    ) -> PerplexityResult:
        """Score a text; on_scored is called as it goes.

        Raises: as decide().
        """
        if isinstance(request, str):
            request = PerplexityRequest(text=request)
        with self._request():
            return self._perplexity.score(request, on_scored)

    @property
    def info(self) -> Info:
        """What the engine sees of its model."""
        return self._engine.info

    @property
    def prefix_state_mib(self) -> float:
        """What the kept prefix state takes now."""
        return self._kept.size_mib if self._kept else 0.0

    def set_cache_budget(self, n_bytes: int) -> None:
        """Change how much of the streamed experts is kept in memory; what is over it is given back at once.

        Raises: Refused, where nothing streams; EngineError.
        """
        check_whole("n_bytes", n_bytes, 0, MAX_BYTES)
        self._check_process()
        with self._serving:
            self._generating.set_cache_budget(n_bytes)

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
        if self._serving.acquire(blocking=False):
            self._aside.drop()
            if self._kept is not None:
                self._kept.drop()
            self._serving.release()

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
            if self._route_trace is not None:
                self._route_trace.began()
            if self._probe is not None:
                self._probe.began()
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


def check_prefix_cache(mode: str) -> None:
    """Raises: Refused, for what is no mode."""
    if mode not in PREFIX_CACHE_MODES:
        raise Refused(f"prefix_cache must be one of {', '.join(PREFIX_CACHE_MODES)}, not {mode!r}")


def _all_of(hooks: list[Callable[[Routing], None]]) -> Callable[[Routing], None] | None:
    """One hook that calls each; none for none, which is what costs nothing."""

    def call(routing: Routing) -> None:
        for hook in hooks:
            hook(routing)

    return call if len(hooks) > 1 else hooks[0] if hooks else None
