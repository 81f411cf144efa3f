"""The bounded queue in front of one actor.

Invariant: at most `size` messages of local senders are in it; a message is either refused at once, or waits with its
sender, or is in the queue. Senders that wait get room in the order they came, so messages of one sender keep their
order. What a link or a supervisor delivers has its own bound (the link's credit window; one ping) and takes no room
from local senders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from actors.kernel.reply import OpenAsks, Reply
from actors.kernel.wakeup import Wakeup
from actors.messages.errors import ActorGone, MailboxFull

M = TypeVar("M")


class EndOfMail(Exception):
    """The mailbox is closed and empty. Never leaves the kernel."""


class Envelope(Generic[M]):
    """A message, the right to answer it and, for one that came on credit, whom to tell that it has been taken."""

    __slots__ = ("message", "reply", "taken")

    def __init__(self, message: M, reply: Reply, taken: Callable[[], None] | None = None) -> None:
        self.message = message
        self.reply = reply
        self.taken = taken


class _WaitingSender(Generic[M]):
    __slots__ = ("ended", "envelope", "refused")

    def __init__(self, envelope: Envelope[M]) -> None:
        self.envelope = envelope
        self.ended = anyio.Event()
        self.refused = False


class Mailbox(Generic[M]):
    """One receiver, any number of senders, all on one event loop."""

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"mailbox {name!r}: size {size} is below 1")
        self.name = name
        self.size = size
        self.asks = OpenAsks(name)
        self.gone: str | None = None  # why nothing is accepted any more
        self._room = size
        self._queue: deque[Envelope[M]] = deque()
        self._senders: deque[_WaitingSender[M]] = deque()
        self._arrival = Wakeup()
        self._when_gone: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def put_nowait(self, envelope: Envelope[M]) -> None:
        """Raises MailboxFull, ActorGone."""
        self._check_open()
        if self._room == 0:
            raise MailboxFull(self.name, self.size)
        self._room -= 1
        self._append(envelope)

    async def put(self, envelope: Envelope[M]) -> None:
        """Waits for room. Raises ActorGone."""
        self._check_open()
        if self._room > 0:
            self._room -= 1
            self._append(envelope)
            return
        sender = _WaitingSender(envelope)
        self._senders.append(sender)
        try:
            await sender.ended.wait()
        except BaseException:
            if not sender.ended.is_set():
                self._senders.remove(sender)
            raise
        if sender.refused:
            raise ActorGone(self.name, self.gone or "it has ended")

    def deliver(self, envelope: Envelope[M]) -> None:
        """For senders with a bound of their own. `envelope.taken` must be set. Raises ActorGone."""
        assert envelope.taken is not None
        self._check_open()
        self._append(envelope)

    async def take(self) -> Envelope[M]:
        """The next message. Raises EndOfMail when there is none and will be none."""
        while True:
            envelope = self.take_nowait()
            if envelope is not None:
                return envelope
            if self.gone is not None:
                raise EndOfMail
            await self._arrival.wait()

    def take_nowait(self) -> Envelope[M] | None:
        if not self._queue:
            return None
        envelope = self._queue.popleft()
        if envelope.taken is not None:
            envelope.taken()
        elif self._senders:
            sender = self._senders.popleft()
            self._queue.append(sender.envelope)
            sender.ended.set()
        else:
            self._room += 1
        return envelope

    def close(self, reason: str) -> None:
        """Accepts nothing more; what is in the queue may still be taken. Senders that wait get ActorGone."""
        if self.gone is not None:
            return
        self.gone = reason
        senders, self._senders = self._senders, deque()
        for sender in senders:
            sender.refused = True
            sender.ended.set()
        self._arrival.wake()
        for callback in self._when_gone:
            callback(reason)

    def drain(self, reason: str) -> int:
        """The actor has ended: every ask, in the queue or kept for later, fails with ActorGone.

        Returns how many tells were in the queue: their senders are not told, so the caller must say it.
        """
        self.close(reason)
        self.asks.fail_all(reason)
        lost = sum(envelope.reply.is_tell for envelope in self._queue)
        self._queue.clear()
        return lost

    def when_gone(self, callback: Callable[[str], None]) -> None:
        """Calls `callback(reason)` once, when the mailbox closes."""
        if self.gone is not None:
            callback(self.gone)
        else:
            self._when_gone.append(callback)

    def _check_open(self) -> None:
        if self.gone is not None:
            raise ActorGone(self.name, self.gone)

    def _append(self, envelope: Envelope[M]) -> None:
        self._queue.append(envelope)
        self._arrival.wake()
