"""Messages that an actor owes to another one and may neither drop nor wait for in `receive`.

Two actors that wait for each other's full mailboxes stand still for ever. So nobody waits in a circle: the scheduler
may wait for the AdmissionActor, the executor and the TransferActor, and what these three owe to the scheduler leaves
from a task beside their `receive`. An outbox needs no bound of its own: it holds at most an add and an abort per
live request.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

from actors.kernel.address import Address

M = TypeVar("M")


class Outbox(Generic[M]):
    """FIFO. `run` belongs into the owner's task group; it ends the owner with ActorGone when the receiver is gone."""

    def __init__(self, receiver: Address[M]) -> None:
        self._receiver = receiver
        self._waiting: deque[M | anyio.Event] = deque()
        self._filled = anyio.Event()

    def post(self, message: M) -> None:
        self._waiting.append(message)
        self._filled.set()

    async def flushed(self) -> None:
        """Returns when all that was posted before has been told: what the caller sends then does not overtake it."""
        passed = anyio.Event()
        self._waiting.append(passed)
        self._filled.set()
        await passed.wait()

    def __len__(self) -> int:
        return len(self._waiting)

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled = anyio.Event()
            while self._waiting:
                first = self._waiting[0]
                if isinstance(first, anyio.Event):
                    first.set()
                else:
                    await self._receiver.tell(first)
                self._waiting.popleft()
