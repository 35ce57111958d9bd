"""A conversation's state while decisions have the engine."""

from bmoe.backends import SessionEngine
from bmoe.decide.backend import State
from bmoe.generate.conversation import Conversation


class Aside:
    """Keeps the state of a conversation from when something else replaces it to its next turn."""

    def __init__(self, engine: SessionEngine, conversation: Conversation) -> None:
        self._engine = engine
        self._conversation = conversation
        self._state: State | None = None

    def put(self) -> None:
        """Save the conversation's state, which is about to be replaced. Only the first call after a turn does."""
        conversation = self._conversation
        if self._state is not None or not conversation.tokens:
            return
        if self._engine.position == len(conversation.tokens):
            self._state = self._engine.save_state()
        else:
            conversation.tokens = []  # an interrupt left the state elsewhere

    def take_back(self) -> None:
        """Make the engine's state the conversation's again."""
        state, self._state = self._state, None
        if state is not None:
            self._engine.load_state(state)
        elif self._engine.info.n_swa > 0 and self._conversation.tokens:
            # A window that was put aside comes back laid out anew. One that was not is laid out so too, or a decision
            # in between would show in the last bits.
            self._engine.save_state()

    def drop(self) -> None:
        self._state = None
