"""Which transports an endpoint has: tcp always, nixl where it is asked for and works."""

from __future__ import annotations

import logging

from anyio.abc import TaskGroup

from actors.configuration import Transport as TransportSetting
from actors.messages.errors import ConfigurationError
from connectors.memory import KVMemory
from connectors.transports import nixl_agent
from connectors.transports.face import Transport, TransportUnavailable
from connectors.transports.faulty import Faults, FaultyTransport
from connectors.transports.nixl import NixlTransport
from connectors.transports.tcp import TcpTransport

log = logging.getLogger(__name__)


def available() -> tuple[TransportSetting, ...]:
    """What is installed here, best first. Costs no import; only starting it proves that it works."""
    return ("nixl", "tcp") if nixl_agent.installed() else ("tcp",)


async def start_transports(
    setting: TransportSetting, *, memory: KVMemory, tasks: TaskGroup, agent_name: str, faults: Faults | None
) -> dict[str, Transport]:
    """Started transports by name, the preferred one first. Raises ConfigurationError when `nixl` cannot be had."""
    started: dict[str, Transport] = {}
    if setting == "nixl" or (setting == "auto" and "nixl" in available()):
        try:
            started["nixl"] = await _start(NixlTransport(agent_name), memory, tasks, faults)
        except TransportUnavailable as error:
            if setting == "nixl":
                raise ConfigurationError(f"--transport nixl: {error}; `--transport tcp` works everywhere") from error
            log.warning("nixl does not work here, falling back to tcp error=%s", error)
    started["tcp"] = await _start(TcpTransport(), memory, tasks, faults)
    return started


async def _start(inner: Transport, memory: KVMemory, tasks: TaskGroup, faults: Faults | None) -> Transport:
    transport = inner if faults is None else FaultyTransport(inner, faults)
    await transport.start(memory, tasks)
    return transport
