"""The control listener against peers that do not keep to the protocol, and owners whose leases die under a copy."""

from __future__ import annotations

import socket
import struct
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec
import numpy as np
import pytest

from actors.messages.lease import (
    LeaseOpened,
    LeaseRefused,
    OpenLease,
    ReadBlocks,
    RefusedLease,
    RenewLease,
    Ticket,
)
from actors.messages.transfer import LeaseExpired, LeaseGranted
from connectors.transports.frames import MAX_FRAME_BYTES, FrameReader, ProtocolError, frame
from connectors.transports.tcp_control import TcpLink, TcpNetwork
from tests.connectors.harness import LAYOUT, Side, grant_order, int32, pattern, running


def owning() -> AbstractAsyncContextManager[Side]:
    pool = pattern(1, 1024, LAYOUT.block_bytes)
    return running(Side(pool, LAYOUT, engine_id="prefill-0", lease_s=0.5))


async def granted(owner: Side, request_id: str, num_blocks: int = 4) -> Ticket:
    owner.endpoint.handle(grant_order(request_id, range(num_blocks)))
    return (await owner.wait_for(LeaseGranted, request_id)).ticket


async def linked(owner: Side) -> TcpLink:
    return await TcpNetwork().connect("127.0.0.1", owner.endpoint.control_port)


def opening(ticket: Ticket, **changes: object) -> OpenLease:
    request = OpenLease("prefill-0", 1, ticket.lease_id, ticket.capability, LAYOUT, "decode-0", "tcp")
    return msgspec.structs.replace(request, **changes)


NO_FRAMES = {
    "too long": struct.pack("<II", MAX_FRAME_BYTES + 1, 0),
    "huge": b"\xff" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n",
    "no msgpack": struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
    "not a message": struct.pack("<II", 3, 0) + msgspec.msgpack.encode([1, 2]),
    "unknown type": (lambda body: struct.pack("<II", len(body), 0) + body)(msgspec.msgpack.encode({"type": "Own"})),
    "wrong field": (lambda body: struct.pack("<II", len(body), 0) + body)(
        msgspec.msgpack.encode({"type": "RenewLease", "epoch": "one", "lease_id": 1, "capability": b""})
    ),
    "deeply nested": struct.pack("<II", 100_000, 0) + b"\x91" * 100_000,
    "a reply": frame(0, LeaseRefused(1, RefusedLease.UNKNOWN, "")),
}


@pytest.mark.parametrize("data", NO_FRAMES.values(), ids=NO_FRAMES.keys())
async def test_a_malformed_frame_closes_its_connection_and_no_other(data: bytes) -> None:
    async with owning() as owner:
        link = await linked(owner)
        async with await anyio.connect_tcp("127.0.0.1", owner.endpoint.control_port) as stream:
            await stream.send(data)
            with anyio.fail_after(5), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        ticket = await granted(owner, "a")
        assert isinstance(await link.ask(opening(ticket)), LeaseOpened)
        link.close("done")


async def test_half_a_frame_and_then_the_end_harms_nobody() -> None:
    async with owning() as owner:
        async with await anyio.connect_tcp("127.0.0.1", owner.endpoint.control_port) as stream:
            await stream.send(struct.pack("<II", 100, 0) + b"half")
        link = await linked(owner)
        assert isinstance(await link.ask(opening(await granted(owner, "a"))), LeaseOpened)
        link.close("done")


async def test_frames_cut_anywhere_are_put_together() -> None:
    data = b"".join(frame(call, RenewLease(1, call, b"k" * 16)) for call in range(5))
    for size in (1, 3, 7, 50):
        reader = FrameReader()
        calls = [call for start in range(0, len(data), size) for call, _ in reader.feed(data[start : start + size])]
        assert calls == [0, 1, 2, 3, 4]
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(struct.pack("<II", MAX_FRAME_BYTES + 1, 0)))


async def test_a_forged_capability_learns_nothing() -> None:
    async with owning() as owner:
        ticket, link = await granted(owner, "a"), await linked(owner)
        forged = await link.ask(opening(ticket, capability=bytes(16)))
        absent = await link.ask(opening(ticket, lease_id=4711))
        assert isinstance(forged, LeaseRefused)
        assert isinstance(absent, LeaseRefused)
        assert (forged.reason, forged.detail) == (absent.reason, absent.detail) == (RefusedLease.UNKNOWN, "open")
        assert isinstance(await link.ask(ReadBlocks(1, ticket.lease_id, bytes(16), int32([0]))), LeaseRefused)
        link.close("done")


@pytest.mark.parametrize("indexes", [[], [4], [-1], [0, 1, 2, 3, 4]])
async def test_blocks_outside_the_lease_are_not_given(indexes: list[int]) -> None:
    async with owning() as owner:
        ticket, link = await granted(owner, "a"), await linked(owner)
        answer = await link.ask(ReadBlocks(1, ticket.lease_id, ticket.capability, int32(indexes)))
        assert isinstance(answer, LeaseRefused)
        assert answer.reason is RefusedLease.INCOMPATIBLE
        link.close("done")


async def test_a_reader_that_stops_reading_cannot_hold_the_blocks_beyond_the_lease() -> None:
    """32 MiB do not fit the sockets' buffers: the copy stands still until the lease is dead, then ends with it."""
    async with owning() as owner:
        ticket = await granted(owner, "a", 1024)
        with socket.create_connection(("127.0.0.1", owner.endpoint.control_port)) as reader:
            indexes = np.arange(1024, dtype="<i4").tobytes()
            reader.sendall(frame(0, ReadBlocks(1, ticket.lease_id, ticket.capability, indexes)))
            await owner.wait_for(LeaseExpired, "a", seconds=5.0)
            owner.endpoint.check()
            await anyio.to_thread.run_sync(lambda: drain(reader))


def drain(reader: socket.socket) -> int:
    """Bytes until the end of file (or reset), which must come."""
    reader.settimeout(5.0)
    received = 0
    try:
        while data := reader.recv(1 << 20):
            received += len(data)
    except ConnectionResetError:
        pass
    assert received < 1024 * LAYOUT.block_bytes
    return received


async def test_an_ask_that_its_caller_gave_up_does_not_hold_up_the_next() -> None:
    async with owning() as owner:
        ticket, link = await granted(owner, "a"), await linked(owner)
        with anyio.move_on_after(0) as scope:
            await link.ask(opening(ticket))
        assert scope.cancelled_caught
        assert isinstance(await link.ask(opening(ticket)), LeaseOpened)
        link.close("done")
