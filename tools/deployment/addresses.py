"""Ports of this machine: which are free, and whether the one asked for is."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from actors.messages.errors import ConfigurationError

LOWEST = 10_000
DEFAULT_EPHEMERAL = 32_768


def check_free(host: str, port: int) -> None:
    """Raises ConfigurationError when nothing could listen there now."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use: stop what listens there, or choose another with --port"
            ) from None
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def free_ports(count: int, host: str, seed: int) -> list[int]:
    """Ports to listen on, now and after a restart.

    They lie below the range that the system takes for outgoing connections: one of those could otherwise sit on an
    engine's port while the engine is down.
    """
    ports = list(range(LOWEST, max(_first_ephemeral(), LOWEST + 1000)))
    random.Random(seed).shuffle(ports)
    found: list[int] = []
    for port in ports:
        if len(found) == count:
            break
        try:
            check_free(host, port)
        except ConfigurationError:
            continue
        found.append(port)
    if len(found) < count:
        raise ConfigurationError(f"there are no {count} free ports on {host}")
    return found


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL
