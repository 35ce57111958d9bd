"""Which state to keep, restore and drop: one at most, that of the latest prefix."""

from collections.abc import Sequence

from bmoe.decide.backend import Backend, State

MIB = 1024 * 1024


class KeptPrefix:
    """The state after the latest prefix, and the tokens it stands for."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[int, ...], State] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the kept state has seen; empty where none is kept."""
        return self._kept[0] if self._kept else ()

    @property
    def size_mib(self) -> float:
        return len(self._kept[1]) / MIB if self._kept else 0.0

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether there is a kept state and tokens continue it or are it."""
        mine = self.tokens
        return bool(mine) and tuple(tokens[: len(mine)]) == mine

    def restore(self, backend: Backend) -> None:
        """Load the kept state. Only after begins() said yes."""
        assert self._kept is not None
        backend.load_state(self._kept[1])

    def store(self, backend: Backend, tokens: Sequence[int]) -> None:
        """Keep the backend's state, which has seen tokens, in place of what was kept."""
        # Let go first: a state can be hundreds of MiB, and two at once is what the peak would be made of.
        self._kept = None
        self._kept = (tuple(tokens), backend.save_state())

    def drop(self) -> None:
        self._kept = None
