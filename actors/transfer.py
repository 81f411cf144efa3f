"""TransferActor: loads and lends KV blocks. A thin shell: orders go to the `KVEndpoint`, its reports to one address.

It lives in the worker, where the KV memory is. Invariant: reports leave in the order in which the endpoint made them,
and none is lost while the address lives; when that address is gone the actor fails, and its worker with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import anyio

from actors.configuration import Transport as TransportSetting
from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.messages.lease import KVLayout
from actors.messages.transfer import TransferOrder, TransferReport
from connectors.endpoint import KVEndpoint
from connectors.memory import KVMemory
from connectors.transports.face import ControlNetwork, Transport


class TransferActor(Actor[TransferOrder]):
    """After `started`, `control_port` and `transport_name` say what the worker tells its engine."""

    mailbox_size = 4096  # the scheduler tells without waiting: room for a few orders of every request in an engine

    def __init__(
        self,
        name: str,
        *,
        memory: KVMemory,
        layout: KVLayout,
        engine_id: str,
        epoch: int,
        host: str,
        port: int = 0,
        transport: TransportSetting = "auto",
        lease_s: float = 30.0,
        renewal_s: float = 5.0,
        reports: Address[TransferReport],
        clock: Callable[[], float],
        token_bytes: Callable[[int], bytes],
        fault: str | None = None,
        network: ControlNetwork | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        """`network` and `transports` stand in for sockets in tests. Raises ConfigurationError for a bad `fault`."""
        super().__init__(name)
        self._reports = reports
        # Unbounded, but never longer than the orders and leases that are open: each has one report.
        self._outbox, self._outgoing = anyio.create_memory_object_stream[TransferReport](math.inf)
        self.endpoint = KVEndpoint(
            memory=memory,
            layout=layout,
            engine_id=engine_id,
            epoch=epoch,
            host=host,
            port=port,
            transport=transport,
            lease_s=lease_s,
            renewal_s=renewal_s,
            clock=clock,
            token_bytes=token_bytes,
            report=self._outbox.send_nowait,
            fault=fault,
            network=network,
            transports=transports,
        )

    @property
    def control_port(self) -> int:
        return self.endpoint.control_port

    @property
    def transport_name(self) -> str:
        return self.endpoint.transport_name

    async def started(self) -> None:
        """Raises ConfigurationError: the port is taken, or the transport cannot be had."""
        self.tasks.start_soon(self._deliver)
        await self.endpoint.start(self.tasks)

    async def receive(self, message: TransferOrder, reply: Reply) -> None:
        self.endpoint.handle(message)

    async def stopped(self) -> None:
        await self.endpoint.stop()
        self._outbox.close()
        self._outgoing.close()

    async def _deliver(self) -> None:
        async for report in self._outgoing:
            await self._reports.tell(report)
