"""Tokens to text as it may be shown: whole characters, reasoning apart, cut before a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delta:
    """What can be shown now."""

    text: str = ""
    reasoning: str = ""


class Characters:
    """Bytes to text in whole characters; bytes that form none become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class Reasoning:
    """Text to (answer, reasoning), by the tags between them; a tag that may be beginning is held back."""

    def __init__(self, tags: tuple[str, str], *, inside: bool) -> None:
        self._start, self._end = tags
        self._held = ""
        # before: nothing but blanks so far; inside: reasoning; after: the answer
        self._state = "inside" if inside and self._end else "before" if self._start and self._end else "after"
        # Nothing given out yet behind a tag: the blanks there belong to neither side.
        self._fresh = self._state != "after"

    def feed(self, text: str) -> Delta:
        self._held += text
        if self._state == "before" and not self._opened():
            return Delta()
        if self._state == "inside":
            return self._inside()
        return Delta(text=self._take(self._held))

    def flush(self) -> Delta:
        """The end: what was held back was no tag."""
        rest, self._held = self._held, ""
        return Delta(reasoning=rest) if self._state == "inside" else Delta(text=rest)

    def _opened(self) -> bool:
        """Whether it is known by now which side the text begins on."""
        seen = self._held.lstrip()
        if seen.startswith(self._start):
            self._held, self._state = seen[len(self._start) :], "inside"
            return True
        if self._start.startswith(seen):
            return False
        self._state, self._fresh = "after", False
        return True

    def _inside(self) -> Delta:
        before, tag, after = self._held.partition(self._end)
        if not tag:
            keep = overlap(self._held, [self._end])
            return Delta(reasoning=self._take(self._held[: len(self._held) - keep]))
        reasoning = self._take(before)
        self._held, self._state, self._fresh = after, "after", True
        return Delta(reasoning=reasoning, text=self._take(after))

    def _take(self, text: str) -> str:
        self._held = self._held[len(text) :]
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


class Stops:
    """Text up to the stop string that is complete first; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        self._held += text
        # The one that is complete first, or the text would depend on where it was cut into tokens.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.found = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = overlap(self._held, self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest


class TurnText:
    """The three in a row, and what they have given out so far."""

    def __init__(self, tags: tuple[str, str], *, in_reasoning: bool, stops: Sequence[str]) -> None:
        self._characters = Characters()
        self._reasoning = Reasoning(tags, inside=in_reasoning)
        self._stops = Stops(stops)
        self._tags = tags
        self._given: list[Delta] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self._given)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self._given)

    def feed(self, data: bytes, *, control: bool) -> Delta:
        """The bytes of one token. A control token is shown nowhere; it may be part of a tag."""
        if control and not any(data.decode("utf-8", "replace") in tag for tag in self._tags):
            data = b""
        return self._give(self._reasoning.feed(self._characters.feed(data)))

    def flush(self) -> Delta:
        """What was held back, when nothing follows."""
        tail = self._reasoning.feed(self._characters.flush())
        rest = self._reasoning.flush()
        given = self._give(Delta(text=tail.text + rest.text, reasoning=tail.reasoning + rest.reasoning))
        if self.stopped:
            return given
        held = Delta(text=self._stops.flush())
        self._given.append(held)
        return Delta(text=given.text + held.text, reasoning=given.reasoning)

    def _give(self, delta: Delta) -> Delta:
        if self.stopped:
            return Delta()
        given = Delta(text=self._stops.feed(delta.text), reasoning=delta.reasoning)
        self._given.append(given)
        return given


def overlap(text: str, ends: Sequence[str]) -> int:
    """Length of the longest end of text that begins, but is not all of, one of ends."""
    longest = max((len(end) for end in ends), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(end) > length and end.startswith(tail) for end in ends):
            return length
    return 0
