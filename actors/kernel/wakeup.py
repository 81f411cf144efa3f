"""How one task waits for its own event loop to hand it something: an event for a single waiter, made anew by nobody.

Every step wakes each stream's reader and several actors; an anyio.Event for each of these waits costs more than all
else about the waking. Invariant: nothing is remembered. The waiter looks at what it waits for, and again when it is
woken; between its look and `wait` nothing else runs.
"""

from __future__ import annotations

import asyncio


class Wakeup:
    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next `wake`. One task at a time; it may be cancelled."""
        assert self._waiter is None, "somebody waits already"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
