"""Why a request waited or worked, interval by interval, without a gap from its arrival to its end.

A new interval begins only when the reason changes; what is known about the current one is its `detail`.
"""

from __future__ import annotations

from actors.messages.request import StoryInterval


class Story:
    __slots__ = ("_closed", "detail", "reason", "start")

    def __init__(self, reason: str, start: float) -> None:
        self.reason = reason
        self.start = start
        self.detail = ""
        self._closed: list[StoryInterval] = []

    def turn(self, reason: str, now: float, detail: str = "") -> None:
        if reason != self.reason:
            self._closed.append(StoryInterval(self.reason, self.start, max(now, self.start), self.detail))
            self.reason, self.start = reason, max(now, self.start)
        self.detail = detail

    def intervals(self) -> tuple[StoryInterval, ...]:
        """The last one is open: its end is None."""
        return (*self._closed, StoryInterval(self.reason, self.start, None, self.detail))

    def ended(self, now: float) -> tuple[StoryInterval, ...]:
        return (*self._closed, StoryInterval(self.reason, self.start, max(now, self.start), self.detail))

    def __str__(self) -> str:
        return "; ".join(
            f"{part.reason} from {part.start:g}" + (f" ({part.detail})" if part.detail else "")
            for part in self.intervals()
        )
