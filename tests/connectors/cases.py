"""What a peer can do to a load, for any transport: run by test_two_processes.py, and once more over UCX_TLS=tcp."""

from __future__ import annotations

import signal
from contextlib import AbstractAsyncContextManager

import msgspec
import numpy as np
import pytest

from actors.configuration import Transport
from actors.messages.transfer import BlocksLanded, BlocksQuiet, CancelLoad, PeerLost, TransferFailed
from connectors.transports.face import Transport as TransportFace
from connectors.transports.nixl import NixlTransport
from connectors.transports.tcp import TcpTransport
from tests.connectors.harness import LAYOUT, PeerProcess, Side, reader
from tests.connectors.hooked import Hooked

MANY = 1024  # blocks: 32 MiB, eleven pieces of a NIXL READ


def hooked_reader(transport: Transport, hook: object) -> AbstractAsyncContextManager[Side]:
    assert callable(hook)
    inner: TransportFace = NixlTransport("hooked reader") if transport == "nixl" else TcpTransport()
    transports = {transport: Hooked(inner, hook)}
    return reader(MANY, transports=transports)


async def the_bytes_that_land_are_the_senders(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            sources, targets = [5, 6, 7, 200, 3, 255, 0], [9, 10, 11, 12, 40, 1, 0]
            ticket = peer.grant("a", sources)
            side.endpoint.handle(side.order("a", ticket, targets))
            landed = await side.wait_for(BlocksLanded, "a")
            assert landed.num_bytes == 7 * 32768
            assert np.array_equal(side.blocks[targets], peer.blocks[sources])
            assert not np.delete(side.blocks, targets, axis=0).any()  # nothing beside them was touched
            await peer.wait_report("BlocksSent", "a")
        assert peer.finish() == 0


async def fifty_loads_share_one_connection(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport) as side:
            sources = np.arange(250).reshape(50, 5)
            tickets = [peer.grant(f"r{i}", sources[i].tolist()) for i in range(50)]
            for i, ticket in enumerate(tickets):
                side.endpoint.handle(side.order(f"r{i}", ticket, sources[i].tolist()))
            for i in range(50):
                await side.wait_for(BlocksLanded, f"r{i}")
            assert np.array_equal(side.blocks[:250], peer.blocks[:250])
            assert side.endpoint.peers.attempted == 1


async def a_corrupt_block_is_detected(transport: Transport) -> None:
    with PeerProcess(transport=transport) as peer:
        async with reader(transport=transport, fault="corrupt:1,seed:7") as side:
            ticket = peer.grant("a", range(20))
            side.endpoint.handle(side.order("a", ticket, range(20)))
            failed = await side.wait_for(TransferFailed, "a")
            assert (failed.reason, failed.quarantined) == ("checksum", False)
            await peer.wait_report("BlocksSent", "a")  # the release obligation is discharged all the same


async def a_killed_peer_fails_the_load_at_once(transport: Transport) -> None:
    with PeerProcess(transport=transport, num_blocks=MANY) as peer:

        def kill() -> None:
            peer.kill()
            peer.process.wait()

        async with hooked_reader(transport, kill) as side:
            ticket = peer.grant("a", range(MANY))
            side.endpoint.handle(side.order("a", ticket, range(MANY), timeout_s=30.0))
            failed = await side.wait_for(TransferFailed, "a", seconds=2.0)
            assert failed.reason == "peer_lost"
            if failed.quarantined:
                await side.wait_for(BlocksQuiet, "a", seconds=2.0)
            lost = await side.wait_for(PeerLost, "")
            assert (lost.engine_id, lost.epoch) == ("prefill-0", 1)
            assert side.endpoint.reader.num_held == 0


async def a_stopped_peer_is_noticed_by_the_deadline(transport: Transport) -> TransferFailed:
    """And once it goes on, whatever was in flight comes to rest."""
    with PeerProcess(transport=transport, num_blocks=MANY) as peer:
        async with hooked_reader(transport, lambda: peer.signal(signal.SIGSTOP)) as side:
            ticket = peer.grant("a", range(MANY))
            side.endpoint.handle(side.order("a", ticket, range(MANY), timeout_s=0.5))
            failed = await side.wait_for(TransferFailed, "a", seconds=2.0)
            assert failed.reason == "deadline"
            assert side.of("a") == [failed]
            peer.signal(signal.SIGCONT)
            if failed.quarantined:
                await side.wait_for(BlocksQuiet, "a")
            # The release was on its way while the peer slept.
            await peer.wait_report("BlocksSent", "a")
            # And the two understand each other still.
            ticket = peer.grant("b", range(8))
            side.endpoint.handle(side.order("b", ticket, range(8)))
            await side.wait_for(BlocksLanded, "b")
            assert np.array_equal(side.blocks[:8], peer.blocks[:8])
            return failed


async def a_cancelled_load_reports_once_when_quiet(transport: Transport) -> None:
    with PeerProcess(transport=transport, num_blocks=MANY) as peer:
        async with hooked_reader(transport, lambda: peer.signal(signal.SIGSTOP)) as side:
            ticket = peer.grant("a", range(MANY))
            side.endpoint.handle(side.order("a", ticket, range(MANY), timeout_s=5.0))
            side.endpoint.handle(CancelLoad("a", 1))
            side.endpoint.handle(CancelLoad("a", 1))
            peer.signal(signal.SIGCONT)
            failed = await side.wait_for(TransferFailed, "a")
            assert (failed.reason, failed.quarantined) == ("cancelled", False)
            assert len(side.of("a")) == 1


async def a_restarted_peer_is_another_one(transport: Transport) -> None:
    async with reader(transport=transport) as side:
        with PeerProcess(transport=transport) as peer:
            port, ticket = peer.port, peer.grant("a", range(8))
            stale = peer.grant("stale", range(8))
            side.endpoint.handle(side.order("a", ticket, range(8)))
            await side.wait_for(BlocksLanded, "a")
            peer.kill()
            await side.wait_for(PeerLost, "")
        with PeerProcess(transport=transport, port=port, epoch=2, seed=2) as peer:
            side.endpoint.handle(side.order("stale", stale, range(8)))
            failed = await side.wait_for(TransferFailed, "stale")
            assert failed.reason == "wrong_epoch"
            assert "prefill-0 epoch 1" in failed.detail
            assert "prefill-0 epoch 2" in failed.detail
            ticket = peer.grant("b", range(8))
            side.endpoint.handle(side.order("b", ticket, range(8)))
            await side.wait_for(BlocksLanded, "b")
            assert np.array_equal(side.blocks[:8], peer.blocks[:8])


async def an_incompatible_layout_names_both_values(transport: Transport) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
    with PeerProcess(transport=transport) as peer:
        async with reader(64, layout, transport) as side:
            side.endpoint.handle(side.order("a", peer.grant("a", range(8)), range(8)))
            failed = await side.wait_for(TransferFailed, "a")
            assert (failed.reason, failed.peer_engine_id) == ("incompatible", "prefill-0")
            assert "num_kv_heads: ours 2, theirs 4" in failed.detail
            await peer.wait_report("BlocksSent", "a")  # it is let go at once, not by time


CASES = [
    the_bytes_that_land_are_the_senders,
    fifty_loads_share_one_connection,
    a_corrupt_block_is_detected,
    a_killed_peer_fails_the_load_at_once,
    a_cancelled_load_reports_once_when_quiet,
    a_restarted_peer_is_another_one,
]
case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
