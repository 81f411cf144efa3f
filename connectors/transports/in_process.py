"""Several endpoints in one process, without sockets: for tests, simulation, and as the stage for seeded faults.

READs are one-sided like NIXL's: they copy from the owner's pool without asking the owner, so an expired lease is read
like a live one, and only checksum and release can tell. A copy takes one loop turn per block.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from actors.messages.lease import ControlReply, ControlRequest
from connectors.memory import KVMemory
from connectors.transports.face import Landed, LeaseService, LinkLost, PeerKey, ReadOrder, ReadState


class Neighbourhood:
    """Where the endpoints of one process find each other: port → service. `kill` ends one as SIGKILL would."""

    def __init__(self) -> None:
        self.services: dict[int, LeaseService] = {}
        self.links: dict[int, list[InProcessLink]] = {}

    def kill(self, port: int) -> None:
        del self.services[port]
        for link in list(self.links.pop(port, [])):
            link.close("the peer was killed")


class InProcessLink:
    def __init__(self, neighbourhood: Neighbourhood, port: int) -> None:
        self.lost: str | None = None
        self._neighbourhood, self._port = neighbourhood, port
        self._watchers: list[Callable[[], None]] = []
        neighbourhood.links.setdefault(port, []).append(self)

    async def ask(self, request: ControlRequest) -> ControlReply:
        if self.lost is not None:
            raise LinkLost(self.lost)
        await checkpoint()
        service = self._neighbourhood.services.get(self._port)
        if service is None:
            self.close("nobody listens any more")
            raise LinkLost("nobody listens any more")
        reply = await service.answer(request)
        if self.lost is not None:
            raise LinkLost(self.lost)
        return reply

    def on_lost(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.lost is not None:
            call()
            return lambda: None
        self._watchers.append(call)
        return lambda: self._watchers.remove(call) if call in self._watchers else None

    def close(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        links = self._neighbourhood.links.get(self._port, [])
        if self in links:
            links.remove(self)
        watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()


class InProcessNetwork:
    """One endpoint's way into the neighbourhood."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood

    async def listen(self, service: LeaseService, host: str, port: int, tasks: TaskGroup) -> int:
        services = self._neighbourhood.services
        port = port or max(services, default=0) + 1
        services[port] = service
        return port

    async def connect(self, host: str, port: int) -> InProcessLink:
        await checkpoint()
        if port not in self._neighbourhood.services:
            raise LinkLost(f"{host}:{port}: nobody listens")
        return InProcessLink(self._neighbourhood, port)


class InProcessReading(ReadState):
    def __init__(self) -> None:
        super().__init__(cancellable=True)
        self.scope = anyio.CancelScope()

    def stop(self) -> None:
        self.scope.cancel()


class InProcessTransport:
    name = "in_process"
    agent_metadata = b""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        self._memory, self._tasks = memory, tasks

    def read(self, order: ReadOrder, landed: Landed) -> InProcessReading:
        reading = InProcessReading()
        self._tasks.start_soon(self._run, order, landed, reading)
        return reading

    def forget(self, peer: PeerKey) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def _run(self, order: ReadOrder, landed: Landed, reading: InProcessReading) -> None:
        failure: str | None = "stopped"
        try:
            with reading.scope:
                for position, (source, target) in enumerate(
                    zip(order.sources.tolist(), order.targets.tolist(), strict=True)
                ):
                    await checkpoint()
                    service = self._neighbourhood.services.get(order.ticket.port)
                    if service is None:
                        failure = "the peer is gone"
                        return
                    self._memory.block(target)[:] = service.memory.block(source)
                    landed(position, position + 1)
                failure = None
        finally:
            reading.end(failure)
