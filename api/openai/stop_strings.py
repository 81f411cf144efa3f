"""Stop strings in a text that comes in pieces. Pure.

The text ends at the first character at which some stop string is complete, and is cut where the longest one complete
there begins. So the answer does not depend on how the text falls into tokens. Only the longest tail that is a proper
prefix of a stop string is held back. O(1) per character and stop string (Knuth, Morris and Pratt 1977).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in stop]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may go out now. `stopped` says that it was the last."""
        if not self._patterns:
            return piece
        text = self._held + piece
        for position, character in enumerate(piece, start=len(self._held) + 1):
            complete = [pattern.length for pattern in self._patterns if pattern.advance(character)]
            if complete:
                self.stopped, self._held = True, ""
                return text[: position - max(complete)]
        hold = max(pattern.matched for pattern in self._patterns)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """At the end of a text that was not stopped: what was held back."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """`matched`: the length of the longest tail of the text so far that begins the stop string."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.length = len(text)
        self.matched = 0
        self._shorter = [0] * len(text)  # [i]: the longest proper prefix of text[:i + 1] that is its suffix too
        known = 0
        for index in range(1, len(text)):
            while known and text[index] != text[known]:
                known = self._shorter[known - 1]
            known += text[index] == text[known]
            self._shorter[index] = known

    def advance(self, character: str) -> bool:
        """Whether this character completes the stop string; no more characters may follow then."""
        while self.matched and character != self._text[self.matched]:
            self.matched = self._shorter[self.matched - 1]
        self.matched += character == self._text[self.matched]
        return self.matched == self.length
