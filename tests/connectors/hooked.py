"""A transport that calls a hook once, when the first piece of its first READ has landed, off the loop."""

from __future__ import annotations

from collections.abc import Callable

from anyio.abc import TaskGroup

from connectors.memory import KVMemory
from connectors.transports.face import Landed, PeerKey, Reading, ReadOrder, Transport


class Hooked:
    def __init__(self, inner: Transport, hook: Callable[[], None]) -> None:
        self._inner, self._hooks = inner, [hook]
        self.name = inner.name

    @property
    def agent_metadata(self) -> bytes:
        return self._inner.agent_metadata

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        await self._inner.start(memory, tasks)

    def read(self, order: ReadOrder, landed: Landed) -> Reading:
        def hooked(first: int, last: int) -> None:
            if self._hooks:
                self._hooks.pop()()
            landed(first, last)

        return self._inner.read(order, hooked)

    def forget(self, peer: PeerKey) -> None:
        self._inner.forget(peer)

    async def stop(self) -> None:
        await self._inner.stop()
