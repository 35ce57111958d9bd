"""The process's stdin and stdout as a session's, and the signals that end it."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INSIST_AFTER_S = 1.0  # a signal that follows within it belongs to the first: a terminal and a parent may both send one


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came while the model was being opened."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Descriptor:
    """A descriptor as a stream without a buffer, so that no lock of one is held when the process ends."""

    def __init__(self, number: int | None) -> None:
        self.number = number  # None: it was closed before we began

    def read(self, size: int, /) -> bytes:
        """What there is, after waiting for something."""
        while self.number is not None:
            try:
                return os.read(self.number, size)
            except BlockingIOError:  # a parent may have made its end, and so ours, non-blocking
                select.select([self.number], [], [])
        return b""

    def write(self, data: bytes, /) -> None:
        """All of it. Raises: OSError."""
        if self.number is None:
            raise OSError("stdout is closed")
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.number, rest) :]
            except BlockingIOError:
                select.select([], [self.number], [])

    def flush(self) -> None:
        """Nothing is held back."""


def take_stdout() -> Descriptor:
    """stdout for the protocol alone: what else is printed from now on, by a child too, comes out on stderr."""
    if sys.__stdout__ is None:
        return Descriptor(None)
    ours = os.dup(1)
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    if sys.stderr is not None:
        sys.stdout = sys.stderr
    return Descriptor(ours)


def stdin() -> Descriptor:
    """What the process was given to read."""
    return Descriptor(None if sys.__stdin__ is None else 0)


class Signals:
    """SIGINT and SIGTERM, from here to the end of the process, but for those that a parent had ignored.

    At first they raise Interrupted in the main thread. Once `hand_over` was called they are told in a thread of their
    own, whatever runs meanwhile, and so is the end of stdout's reader. A second signal, not at once after the first,
    ends the process there and then: the host does not read, or the engine does not stop.
    """

    def __init__(self, stdout: Descriptor) -> None:
        self._raises = True
        self._told = threading.Lock()
        self._on_signal: Callable[[int], None] | None = None
        self._on_hang_up: Callable[[], None] = lambda: None
        self._first: int | None = None
        self._first_at = 0.0
        self._is_hung_up = False
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        threading.Thread(target=self._watch, args=(reading, stdout), daemon=True).start()

    @property
    def first(self) -> int | None:
        """The signal that came, if one did."""
        return self._first

    def hand_over(self, *, on_signal: Callable[[int], None], on_hang_up: Callable[[], None]) -> None:
        """Raise nothing from here on, but call these, at once for what came already."""
        self._raises = False
        with self._told:
            self._on_signal, self._on_hang_up = on_signal, on_hang_up
            if self._first is not None:
                on_signal(self._first)
            if self._is_hung_up:
                on_hang_up()

    def settle(self) -> None:
        """The exit code is known: after a first signal no other may change it. Python's end would let one kill us."""
        for number in SIGNALS if self._first is not None else ():
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise Interrupted(number)

    def _watch(self, reading: int, stdout: Descriptor) -> None:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        if stdout.number is not None:
            poll.register(stdout.number, 0)  # only its end is reported
        while True:
            for number, _ in poll.poll():
                if number == reading:
                    self._take(os.read(reading, 1)[0])
                    continue
                poll.unregister(number)
                with self._told:
                    self._is_hung_up = True
                    self._on_hang_up()

    def _take(self, number: int) -> None:
        if number not in SIGNALS:
            return
        with self._told:
            if self._first is not None:
                if time.monotonic() - self._first_at > INSIST_AFTER_S:
                    os._exit(128 + number)
                return
            self._first, self._first_at = number, time.monotonic()
            if self._on_signal is not None:
                self._on_signal(number)
