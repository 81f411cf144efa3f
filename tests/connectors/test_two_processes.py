"""tcp and nixl between two real processes: what a load ends in, and that the bytes are the sender's."""

from __future__ import annotations

import numpy as np
import pytest

from actors.configuration import Transport
from actors.messages.transfer import BlocksLanded, TransferFailed
from connectors.transports.choose import available
from tests.connectors.harness import PeerProcess, reader

TRANSPORTS = available()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_bytes_that_land_are_the_senders(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            sources, targets = [5, 6, 7, 200, 3, 255, 0], [9, 10, 11, 12, 40, 1, 0]
            ticket = peer.grant("a", sources)
            side.endpoint.handle(side.order("a", ticket, targets))
            landed = await side.wait_for(BlocksLanded, "a")
            assert landed.num_bytes == 7 * 32768
            assert np.array_equal(side.blocks[targets], peer.blocks[sources])
            rest = np.delete(side.blocks, targets, axis=0)
            assert not rest.any()  # nothing beside them was touched
            peer.wait_report("BlocksSent", "a")
        assert peer.finish() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_from_the_local_prefix_cache_are_not_read(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            ticket = peer.grant("a", range(10, 20))
            side.endpoint.handle(side.order("a", ticket, [1, 2, 3], first=7))
            landed = await side.wait_for(BlocksLanded, "a")
            assert landed.num_bytes == 3 * 32768
            assert np.array_equal(side.blocks[1:4], peer.blocks[17:20])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lease_that_expired_before_the_read_gives_nothing(transport: Transport) -> None:
    with PeerProcess(transport=transport, lease_s=0.2) as peer:
        async with reader(transport=transport) as side:
            ticket = peer.grant("a", [1, 2, 3])
            peer.wait_report("LeaseExpired", "a")
            side.endpoint.handle(side.order("a", ticket, [1, 2, 3]))
            failed = await side.wait_for(TransferFailed, "a")
            assert (failed.reason, failed.quarantined, failed.peer_engine_id) == ("expired", False, "prefill-0")
