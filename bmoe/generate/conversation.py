"""What has been said, and the tokens the state holds of it."""

from collections.abc import Sequence

from bmoe.decide.backend import ChatMessage
from bmoe.generate.backend import GenerateBackend


class Conversation:
    """The messages so far, and which tokens the backend's state stands for."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.tokens: list[int] = []

    def clear(self) -> None:
        self.messages = []
        self.tokens = []

    def resume(self, backend: GenerateBackend, prompt: Sequence[int]) -> int:
        """Bring the state to the longest beginning of prompt that it holds, and return its length.

        At least one token is left to compute, for its logits.
        """
        if backend.position != len(self.tokens):
            self.tokens = []  # an interrupt left the state elsewhere
        common = 0
        for mine, wanted in zip(self.tokens, prompt[:-1], strict=False):
            if mine != wanted:
                break
            common += 1
        if common == 0 or (common < len(self.tokens) and not backend.cut_state(common)):
            backend.drop_state()
            common = 0
        self.tokens = list(prompt[:common])
        return common

    def went_on(self, backend: GenerateBackend, tokens: Sequence[int]) -> None:
        """Tokens were prefilled, or, after a cancel, were not: the backend's position says."""
        self.tokens += tokens
        if backend.position != len(self.tokens):
            del self.tokens[backend.position :]
        if backend.position != len(self.tokens):
            self.tokens = []
            backend.drop_state()
