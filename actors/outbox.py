"""Messages that an actor owes to another one and may neither drop nor wait for in `receive`.

Two actors that wait for each other's full mailboxes stand still for ever. So nobody waits in a circle: the scheduler
may wait for the AdmissionActor, the executor and the TransferActor, and what these three owe to the scheduler leaves
from a task beside their `receive`. Invariant: everything arrives in the order in which it was posted or passed on.
An outbox is bounded: it holds at most an add and an abort per live request, and MAX_ASKS asks.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.messages.errors import KvyardError, RefusalReason, RequestRefused

M = TypeVar("M")
MAX_ASKS = 64  # for which the receiver has no room yet


class _Ask(Generic[M]):
    """The asker is whoever holds `reply`'s other end."""

    __slots__ = ("_reply", "message")

    def __init__(self, message: M, reply: Reply) -> None:
        self.message, self._reply = message, reply

    def end(self, value: object, error: KvyardError | None) -> None:
        if error is None:
            self._reply.send(value)
        else:
            self._reply.fail(error)


class Outbox(Generic[M]):
    """FIFO. `run` belongs into the owner's task group; it ends the owner with ActorGone when the receiver is gone."""

    def __init__(self, receiver: Address[M]) -> None:
        self._receiver = receiver
        self._waiting: deque[M | _Ask[M]] = deque()
        self._num_asks = 0
        self._filled = anyio.Event()

    def post(self, message: M) -> None:
        self._waiting.append(message)
        self._filled.set()

    def pass_on(self, message: M, reply: Reply) -> None:
        """An ask: the receiver's answer goes to `reply`, whenever it comes. Refused while MAX_ASKS wait for room."""
        if self._num_asks == MAX_ASKS:
            text = f"{MAX_ASKS} orders wait already, and actor {self._receiver.name!r} takes none: send it again later"
            reply.fail(RequestRefused(RefusalReason.QUEUE_FULL, text, retry_after=1))
            return
        self._num_asks += 1
        self._waiting.append(_Ask(message, reply))
        self._filled.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled = anyio.Event()
            while self._waiting:
                first = self._waiting[0]
                if isinstance(first, _Ask):
                    await self._receiver.ask_for(first.message, first)
                    self._num_asks -= 1
                else:
                    await self._receiver.tell(first)
                self._waiting.popleft()
