"""tcp and nixl between two real processes: what a load ends in, and that the bytes are the sender's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from actors.configuration import Transport
from actors.messages.transfer import BlocksLanded, HoldTicket, ReleaseTicket, TransferFailed
from connectors.memory import KVMemory
from connectors.transports.choose import available
from tests.connectors.cases import (
    a_stopped_peer_is_noticed_by_the_deadline,
    an_incompatible_layout_names_both_values,
    case,
)
from tests.connectors.harness import LAYOUT, PeerProcess, reader

TRANSPORTS = available()
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@each_transport
@case
async def test_case(case: Callable[[Transport], Awaitable[None]], transport: Transport) -> None:
    await case(transport)


def test_nixl_with_ucx_over_tcp_only() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "tests/connectors/over_ucx_tcp.py"]
    result = subprocess.run(
        command,
        env=os.environ | {"UCX_TLS": "tcp"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "7 passed" in result.stdout


async def test_an_incompatible_layout_names_both_values() -> None:
    await an_incompatible_layout_names_both_values("tcp")


async def test_tcp_never_quarantines() -> None:
    failed = await a_stopped_peer_is_noticed_by_the_deadline("tcp")
    assert not failed.quarantined


@each_transport
async def test_blocks_from_the_local_prefix_cache_are_not_read(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            ticket = peer.grant("a", range(10, 20))
            side.endpoint.handle(side.order("a", ticket, [1, 2, 3], first=7))
            landed = await side.wait_for(BlocksLanded, "a")
            assert landed.num_bytes == 3 * 32768
            assert np.array_equal(side.blocks[1:4], peer.blocks[17:20])


async def test_an_empty_load_only_releases() -> None:
    """Everything was in the local prefix cache. (Reference F12: an empty transfer was reported by nobody.)"""
    with PeerProcess() as peer:
        async with reader() as side:
            side.endpoint.handle(side.order("a", peer.grant("a", range(4)), [], first=4))
            assert (await side.wait_for(BlocksLanded, "a")).num_bytes == 0
            await peer.wait_report("BlocksSent", "a")


async def test_a_pool_outside_of_host_memory_takes_no_blocks() -> None:
    """Such as a GPU's: an endpoint without blocks. The load fails at once."""
    assert KVMemory.nothing(LAYOUT.block_bytes).num_bytes == 0
    with PeerProcess() as peer:
        async with reader(num_blocks=0) as side:
            side.endpoint.handle(side.order("a", peer.grant("a", range(4)), [1, 2, 3, 4]))
            assert (await side.wait_for(TransferFailed, "a")).reason == "invalid"


async def test_a_lease_that_expired_before_the_read_gives_nothing() -> None:
    with PeerProcess(lease_s=0.2) as peer:
        async with reader() as side:
            ticket = peer.grant("a", [1, 2, 3])
            await peer.wait_report("LeaseExpired", "a")
            side.endpoint.handle(side.order("a", ticket, [1, 2, 3]))
            failed = await side.wait_for(TransferFailed, "a")
            assert (failed.reason, failed.quarantined, failed.peer_engine_id) == ("expired", False, "prefill-0")


async def test_a_waiting_ticket_is_kept_alive_by_heartbeats_and_let_go_when_released() -> None:
    with PeerProcess(lease_s=0.6) as peer:
        async with reader(renewal_s=0.1) as side:
            ticket = peer.grant("a", [1, 2, 3])
            side.endpoint.handle(HoldTicket("a", ticket))
            # A lease granted later, and not held, expires: so more than its own time has passed for the first.
            peer.grant("later", [7])
            await peer.wait_report("LeaseExpired", "later")
            peer.grant("later-still", [7])
            await peer.wait_report("LeaseExpired", "later-still")
            side.endpoint.handle(side.order("a", ticket, [1, 2, 3]))
            await side.wait_for(BlocksLanded, "a")
            ticket = peer.grant("b", [1, 2, 3])
            side.endpoint.handle(HoldTicket("b", ticket))
            side.endpoint.handle(ReleaseTicket("b", ticket))
            side.endpoint.handle(ReleaseTicket("b", ticket))
            await peer.wait_report("BlocksSent", "b")
            assert side.endpoint.reader.num_held == 0


async def test_a_peer_that_nobody_listens_for_is_lost_at_once() -> None:
    with PeerProcess() as peer:
        ticket = peer.grant("a", [1])
        peer.kill()
        peer.process.wait()
        async with reader() as side:
            side.endpoint.handle(side.order("a", ticket, [1]))
            failed = await side.wait_for(TransferFailed, "a", seconds=2.0)
            assert failed.reason == "peer_lost"
            assert str(peer.port) in failed.detail


@each_transport
async def test_an_idle_endpoint_takes_less_than_four_percent_of_a_core(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            side.endpoint.handle(side.order("a", peer.grant("a", [1]), [1]))
            await side.wait_for(BlocksLanded, "a")
            assert peer.idle_share(seconds=3.0) < 0.04
