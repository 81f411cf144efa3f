"""The right to answer one message, and the book of asks that an actor still owes an answer.

Invariant: every ask ends exactly once: by an answer, by a typed error, by the death of the actor, or because the last
reference to its `Reply` went away unanswered. An actor may keep a `Reply` and answer later.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import anyio

from actors.messages.errors import ActorFailed, ActorGone, KvyardError


class Asker(Protocol):
    """Whoever waits for an answer: a task of this process, or a link on behalf of another process."""

    def end(self, value: object, error: KvyardError | None) -> None:
        """Called at most once, on the event loop's thread."""


class WaitingTask:
    """The asker that is a task of this process."""

    __slots__ = ("_ended", "_error", "_value")

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._value: object = None
        self._error: KvyardError | None = None

    def end(self, value: object, error: KvyardError | None) -> None:
        self._value, self._error = value, error
        self._ended.set()

    async def answer(self) -> object:
        """The value replied; raises the typed error replied."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value


class OpenAsks:
    """Which askers still wait for one actor, in the order of their asks."""

    __slots__ = ("_actor", "_loop", "_open")

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._open: dict[Asker, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, asker: Asker) -> Reply:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._open[asker] = None
        return Reply(self, asker)

    def forget(self, asker: Asker) -> None:
        """The asker waits no longer: an answer that still comes is ignored."""
        self._open.pop(asker, None)

    def end(self, asker: Asker, value: object, error: KvyardError | None) -> None:
        if asker in self._open:
            del self._open[asker]
            asker.end(value, error)

    def fail_all(self, reason: str) -> None:
        """The actor has ended: every asker learns it."""
        askers, self._open = self._open, {}
        for asker in askers:
            asker.end(None, ActorGone(self._actor, reason))

    def abandon(self, asker: Asker) -> None:
        """The reply is garbage. May be called on any thread and in the middle of anything: it only leaves a note."""
        if asker in self._open and self._loop is not None:
            error = ActorFailed(self._actor, "it let go of the message without an answer")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self.end, asker, None, error)


class Reply:
    """Given to `receive` beside every message. Answers once; for a tell, or after the asker has gone, does nothing."""

    __slots__ = ("_answered", "_asker", "_asks")

    def __init__(self, asks: OpenAsks | None = None, asker: Asker | None = None) -> None:
        self._answered = False
        self._asks = asks
        self._asker = asker

    @property
    def is_tell(self) -> bool:
        return self._asker is None

    def send(self, value: object) -> None:
        """The value that `ask` returns. Raises RuntimeError when this message has been answered before."""
        self._end(value, None)

    def fail(self, error: KvyardError) -> None:
        """The error that `ask` raises. Raises RuntimeError when this message has been answered before."""
        self._end(None, error)

    def _end(self, value: object, error: KvyardError | None) -> None:
        if self._answered:
            raise RuntimeError("this message has been answered before")
        self._answered = True
        if self._asks is not None and self._asker is not None:
            self._asks.end(self._asker, value, error)

    def __del__(self) -> None:
        if not self._answered and self._asks is not None and self._asker is not None:
            self._asks.abandon(self._asker)
