"""The loop of a session over two streams: requests come in lines, each gets one final line, in order.

Three threads: the caller's serves, one reads, one repeats a cancel until it has been noticed. A host's cancel is
therefore read at once, whatever runs.
"""

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bmoe import protocol
from bmoe.decide import BadLogits, DecideRequest, DecideResult, Refused
from bmoe.generate import GenerateRequest, GenerateResult, Step
from bmoe.lines import Overlong, Source, lines
from bmoe_native.errors import ArgumentError, BusyError, EngineError

MAX_QUEUED_BYTES = 128 * 2**20
MAX_IGNORED_KEYS = 100  # so many are told apart when saying that they are ignored
_REPEAT_CANCEL_S = 0.01
_HARMLESS = (Refused, BadLogits, ArgumentError, BusyError)


class Answers(Protocol):
    """What serves requests, one at a time: a Session."""

    @property
    def prefix_state_mib(self) -> float: ...
    def decide(self, request: DecideRequest) -> DecideResult: ...
    def generate(self, request: GenerateRequest, on_step: Callable[[Step], None] | None = None) -> GenerateResult: ...
    def cancel(self) -> None: ...


class Sink(Protocol):
    """Where lines go: all of the bytes, at once."""

    def write(self, line: bytes, /) -> object: ...
    def flush(self) -> None: ...


class Watcher(Protocol):
    """Told of what is served: a trace, a view of the progress. The id is JSON text."""

    def began(self, request_id: str, request: DecideRequest | GenerateRequest) -> None: ...
    def stepped(self, request_id: str, step: Step) -> None: ...
    def decided(self, request_id: str, result: DecideResult) -> None: ...
    def done(self, request_id: str, result: GenerateResult) -> None: ...
    def failed(self, request_id: str, message: str) -> None: ...


class End(enum.Enum):
    """Why a session ended."""

    CLOSED = enum.auto()  # close, or the end of the input
    FATAL = enum.auto()  # the engine failed
    STOPPED = enum.auto()  # stop()
    UNHEARD = enum.auto()  # nobody reads what is written


class Unheard(Exception):
    """Whoever read the lines has gone."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request from when it was read to when its final line is written."""

    request: protocol.Request
    held_bytes: int
    cancelled: bool = False


class Outlet:
    """Whole lines into a sink, from any thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._one_line = threading.Lock()

    def send(self, line: bytes) -> None:
        """Raises: Unheard; OSError where the sink fails in another way, a full disk for one."""
        with self._one_line:
            try:
                self._sink.write(line)
                self._sink.flush()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Unheard from error


class Server:
    """One session's requests, from the first line to the last. `run` it once."""

    def __init__(
        self,
        session: Answers,
        source: Source,
        outlet: Outlet,
        *,
        load_s: float = 0.0,
        watchers: Sequence[Watcher] = (),
        note: Callable[[str], None] = lambda text: None,
        max_line_bytes: int = protocol.MAX_LINE_BYTES,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._session = session
        self._source = source
        self._outlet = outlet
        self._load_s = load_s
        self._watchers = watchers
        self._note = note
        self._max_line_bytes = max_line_bytes
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._serving: _Entry | None = None
        self._is_read = False  # no line will follow
        self._is_over = False  # nothing is served any more
        self._end: End | None = None  # of stop() and hang_up()
        self._failure: BaseException | None = None  # the reader's
        self._ignored: set[str] = set()
        self._n_past = 0

    def run(self) -> End:
        """Serve until close, the end of the input, a fatal error, stop() or hang_up().

        Raises: what is neither a refusal nor an engine's error, after its request was answered with a fatal one.
        """
        threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._repeat_cancels)]
        for thread in threads:
            thread.start()
        try:
            return self._serve_all()
        except Unheard:
            return End.UNHEARD
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            threads[1].join()  # the reader may wait for its host for ever

    def stop(self) -> None:
        """Cancel what runs, refuse what waits, and end. Any thread; not a signal handler, for it takes a lock."""
        self._finish(End.STOPPED)

    def hang_up(self) -> None:
        """Cancel what runs and end: nobody listens. As stop()."""
        self._finish(End.UNHEARD)

    def _finish(self, end: End) -> None:
        with self._changed:
            self._end = self._end or end
            if self._serving is not None:
                self._serving.cancelled = True
            self._changed.notify_all()

    # -- the serving thread

    def _serve_all(self) -> End:
        while (entry := self._next()) is not None:
            try:
                self._serve(entry)
            except Unheard:
                raise
            except EngineError as error:
                self._over(entry, str(error) or type(error).__name__)
                return End.FATAL
            except Exception as error:
                self._over(entry, f"{type(error).__name__}: {error}")
                raise
            finally:
                with self._changed:
                    self._serving = None
        if self._failure is not None:
            raise self._failure
        if self._end is End.STOPPED:
            self._refuse_queued("not served: the session was stopped", fatal=False)
        return self._end or End.CLOSED

    def _next(self) -> _Entry | None:
        with self._changed:
            while not self._queue and not self._is_read and self._end is None:
                self._changed.wait()
            if self._end is not None or not self._queue:
                return None
            entry = self._queue.popleft()
            self._queued_bytes -= entry.held_bytes
            self._serving = entry
            return entry

    def _serve(self, entry: _Entry) -> None:
        request = entry.request
        if isinstance(request, protocol.Bad):
            self._refuse(request.id, request.message)
            return
        self._outlet.send(protocol.begin(request.id))
        for watcher in self._watchers:
            watcher.began(request.id, request.request)
        try:
            if isinstance(request, protocol.Decide):
                self._decide(request, entry)
            else:
                self._generate(request, entry)
        except _HARMLESS as error:
            self._refuse(request.id, str(error) or type(error).__name__)

    def _decide(self, asked: protocol.Decide, entry: _Entry) -> None:
        if entry.cancelled:
            result = _never_decided(asked.request, self._session.prefix_state_mib)
        else:
            result = self._session.decide(asked.request)
        for watcher in self._watchers:
            watcher.decided(asked.id, result)
        self._outlet.send(protocol.decided(asked.id, result))

    def _generate(self, asked: protocol.Generate, entry: _Entry) -> None:
        def on_step(step: Step) -> None:
            for watcher in self._watchers:
                watcher.stepped(asked.id, step)
            try:
                self._outlet.send(protocol.progress(step))
            except Unheard:
                self.hang_up()  # ends the turn as a cancel does; nothing is thrown through the engine

        result = _never_generated(self._n_past) if entry.cancelled else self._session.generate(asked.request, on_step)
        self._n_past = result.n_past
        for watcher in self._watchers:
            watcher.done(asked.id, result)
        self._outlet.send(protocol.done(asked.id, result, load_s=self._load_s))

    def _refuse(self, request_id: str, message: str, *, fatal: bool = False) -> None:
        for watcher in self._watchers:
            watcher.failed(request_id, message)
        self._outlet.send(protocol.error(request_id, message, fatal=fatal))

    def _over(self, entry: _Entry, message: str) -> None:
        """The last request that is served, and those that it takes with it. The exit code tells of it even unheard."""
        with contextlib.suppress(Unheard):
            self._refuse(entry.request.id, message, fatal=True)
            self._refuse_queued("not served: the session ended with an earlier error", fatal=True)

    def _refuse_queued(self, message: str, *, fatal: bool) -> None:
        with self._changed:
            self._is_over = True  # the reader adds nothing now
            waiting = list(self._queue)
            self._queue.clear()
        for entry in waiting:
            self._refuse(entry.request.id, message, fatal=fatal)

    # -- the reading thread

    def _read(self) -> None:
        try:
            for line in lines(self._source, self._max_line_bytes):
                if not self._take(line):
                    break
        except Unheard:
            self.hang_up()
        except OSError:
            pass  # a terminal or a socket that went away: the end of the input
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._is_read = True
                self._changed.notify_all()

    def _take(self, line: bytes | Overlong) -> bool:
        """Apply a cancel, queue a request; whether to go on reading."""
        if isinstance(line, Overlong):
            return self._enqueue(protocol.too_long(line.n_bytes, self._max_line_bytes))
        parsed = protocol.parse(line)
        self._say_ignored(parsed.ignored)
        if isinstance(parsed.command, protocol.Close):
            return False
        if isinstance(parsed.command, protocol.Cancel):
            self._cancel()
            return not self._is_over
        return self._enqueue(parsed.command)

    def _enqueue(self, request: protocol.Request) -> bool:
        held_bytes = protocol.held_bytes(request)
        with self._changed:
            if self._is_over:
                return False
            is_full = bool(self._queue) and self._queued_bytes + held_bytes > self._max_queued_bytes
            if not is_full:
                self._queue.append(_Entry(request, held_bytes))
                self._queued_bytes += held_bytes
                self._changed.notify_all()
        if is_full:
            # At once: waiting here, for room or for a turn, would keep the cancel behind this line from being read.
            message = f"the queue is full: {self._max_queued_bytes} bytes of requests are waiting"
            self._outlet.send(protocol.error(request.id, message, fatal=False))
        return True

    def _cancel(self) -> None:
        """The oldest request that was read and not answered is the one that is meant."""
        with self._changed:
            waiting = (entry for entry in self._queue if not isinstance(entry.request, protocol.Bad))
            entry = self._serving or next(waiting, None)
            if entry is not None:
                entry.cancelled = True
                self._changed.notify_all()

    def _say_ignored(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            if key not in self._ignored and len(self._ignored) < MAX_IGNORED_KEYS:
                self._ignored.add(key)
                self._note(f"the key {key!a} is unknown and ignored")

    # -- the cancelling thread

    def _repeat_cancels(self) -> None:
        """A session takes a cancel only between its request's first and last step, and cannot say when that is."""
        with self._changed:
            while not self._is_over:
                if self._serving is None or not self._serving.cancelled:
                    self._changed.wait()
                    continue
                with contextlib.suppress(EngineError):
                    self._session.cancel()
                self._changed.wait(_REPEAT_CANCEL_S)


def _never_decided(request: DecideRequest, prefix_state_mib: float) -> DecideResult:
    """A decision that was cancelled while it waited."""
    return DecideResult(
        cancelled=True,
        choices=request.choices,
        best=-1,
        choice_logp=(),
        outside_mass=0.0,
        outside_text="",
        outside_text_mass=0.0,
        n_tokens=0,
        n_reused=0,
        n_prefilled=0,
        policy_s=0.0,
        restore_s=0.0,
        store_s=0.0,
        prefill_s=0.0,
        prefill_cpu_s=0.0,
        prefix_state_mib=prefix_state_mib,
    )


def _never_generated(n_past: int) -> GenerateResult:
    """A turn that was cancelled while it waited; the conversation is where it was."""
    return GenerateResult(
        ending="cancelled",
        text="",
        reasoning="",
        n_generated=0,
        n_prompt=0,
        n_reused=0,
        n_past=n_past,
        prefill_s=0.0,
        prefill_cpu_s=0.0,
        generate_s=0.0,
        generate_cpu_s=0.0,
        n_major_faults=0,
    )
