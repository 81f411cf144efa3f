"""A worker's KV endpoint: lends blocks of its pool to readers, and reads blocks of others into it.

Composes the lending side (`owner.py`), the reading side (`reader.py`), the control network and the transports; takes
`TransferOrder`s and gives `TransferReport`s. Every order that promises a report ends in exactly one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from anyio.abc import TaskGroup

from actors.configuration import Transport as TransportSetting
from actors.messages.errors import ConfigurationError
from actors.messages.lease import KVLayout
from actors.messages.transfer import (
    CancelLoad,
    GrantLease,
    HoldTicket,
    LoadBlocks,
    ReleaseTicket,
    RevokeLease,
    TransferOrder,
    TransferReport,
)
from connectors.checksums import ChecksumThread
from connectors.lease_book import LeaseBook
from connectors.load import LoadEnvironment
from connectors.memory import KVMemory
from connectors.owner import LeaseOwner
from connectors.peers import Peers
from connectors.reader import LeaseReader
from connectors.transports.choose import start_transports
from connectors.transports.face import ControlNetwork, PeerKey, Transport
from connectors.transports.faulty import FaultPlan, Faults, FaultyNetwork, FaultyTransport
from connectors.transports.tcp_control import TcpNetwork


class KVEndpoint:
    """`network` and `transports` replace sockets in tests; then `transport` is ignored.

    Raises ConfigurationError: an address that nobody can reach, a pool of another layout, a fault that is none.
    """

    def __init__(
        self,
        *,
        memory: KVMemory,
        layout: KVLayout,
        engine_id: str,
        epoch: int,
        host: str,
        port: int,
        transport: TransportSetting,
        lease_s: float,
        renewal_s: float,
        clock: Callable[[], float],
        token_bytes: Callable[[int], bytes],
        report: Callable[[TransferReport], None],
        fault: str | None = None,
        network: ControlNetwork | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ConfigurationError(f"--kv-host {host!r}: other engines need an address at which they reach this one")
        if memory.block_bytes != layout.block_bytes:
            raise ConfigurationError(
                f"the pool has blocks of {memory.block_bytes} bytes, its layout {layout.block_bytes}"
            )
        self._memory, self._layout, self._host, self._port = memory, layout, host, port
        self._engine_id, self._epoch, self._setting = engine_id, epoch, transport
        self._lease_s, self._renewal_s, self._clock = lease_s, renewal_s, clock
        self._token_bytes, self._report = token_bytes, report
        self.faults = Faults(FaultPlan.parse(fault)) if fault else None
        given = network or TcpNetwork()
        self._network = given if self.faults is None else FaultyNetwork(given, self.faults)
        self._given = transports
        self.peers = Peers(self._network, report, self._forget)
        self._checksums = ChecksumThread()
        self._transports: dict[str, Transport] = {}
        self.control_port, self.transport_name = 0, ""

    async def start(self, tasks: TaskGroup) -> None:
        """Raises ConfigurationError: the port is taken, or the transport cannot be had."""
        self._transports = await self._start_transports(tasks)
        self.transport_name = next(iter(self._transports))
        self.owner = LeaseOwner(
            book=LeaseBook(
                engine_id=self._engine_id,
                epoch=self._epoch,
                layout=self._layout,
                lease_s=self._lease_s,
                transports=tuple(self._transports),
            ),
            memory=self._memory,
            checksums=self._checksums,
            clock=self._clock,
            token_bytes=self._token_bytes,
            report=self._report,
            agent_metadata=lambda name: self._transports[name].agent_metadata,
        )
        environment = LoadEnvironment(
            engine_id=self._engine_id,
            layout=self._layout,
            memory=self._memory,
            peers=self.peers,
            transports=self._transports,
            clock=self._clock,
            report=self._report,
        )
        self.reader = LeaseReader(environment, self._renewal_s)
        try:
            self.control_port = await self._network.listen(self.owner, self._host, self._port, tasks)
        except OSError as error:
            await self.stop()
            raise ConfigurationError(f"the KV listener cannot bind {self._host}:{self._port}: {error}") from error
        self.peers.start(tasks)
        self.reader.start(tasks)
        tasks.start_soon(self.owner.run)

    def handle(self, order: TransferOrder) -> None:
        match order:
            case GrantLease():
                self.owner.grant(order, host=self._host, port=self.control_port, transport=self.transport_name)
            case RevokeLease():
                self.owner.revoke(order)
            case HoldTicket():
                self.reader.hold(order)
            case LoadBlocks():
                self.reader.load(order)
            case CancelLoad():
                self.reader.cancel(order)
            case ReleaseTicket():
                self.reader.release(order)

    async def stop(self) -> None:
        """After the task group's own work is cancelled, or just before. Bounded."""
        self.peers.stop()
        for transport in self._transports.values():
            await transport.stop()
        self._checksums.stop()

    def check(self) -> None:
        self.owner.book.check()

    async def _start_transports(self, tasks: TaskGroup) -> dict[str, Transport]:
        if self._given is None:
            name = f"{self._engine_id}/{self._epoch}/{os.getpid()}"
            return await start_transports(
                self._setting, memory=self._memory, tasks=tasks, agent_name=name, faults=self.faults
            )
        started: dict[str, Transport] = {}
        for name, given in self._given.items():
            started[name] = given if self.faults is None else FaultyTransport(given, self.faults)
            await started[name].start(self._memory, tasks)
        return started

    def _forget(self, peer: PeerKey) -> None:
        for transport in self._transports.values():
            transport.forget(peer)
