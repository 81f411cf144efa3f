"""READs over plain TCP: the fallback that is always there.

The owner's code sends, this side copies into the pool. So a READ can be cancelled at any byte and is quiet at once:
this transport never quarantines. It has connections of its own beside the control link, so that bulk bytes never stand
before a heartbeat; an idle one is kept for the next READ.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from actors.messages.lease import BlocksFollow, LeaseRefused, ReadBlocks
from connectors.memory import KVMemory, runs
from connectors.transports.face import Landed, LinkLost, PeerKey, ReadFailed, ReadOrder, ReadState
from connectors.transports.frames import HEADER, MAX_FRAME_BYTES, ProtocolError, decode_reply, frame
from connectors.transports.tcp_control import open_socket

MAX_IDLE_PER_PEER = 2
PIECE_BYTES = 4 << 20  # verified as one, while the next arrives


class TcpReading(ReadState):
    def __init__(self) -> None:
        super().__init__(cancellable=True)
        self.scope = anyio.CancelScope()

    def stop(self) -> None:
        self.scope.cancel()


class TcpTransport:
    name = "tcp"
    agent_metadata = b""

    def __init__(self) -> None:
        self._idle: dict[PeerKey, list[socket.socket]] = {}

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        self._memory, self._tasks = memory, tasks
        self._hashing = anyio.CapacityLimiter(2)

    def read(self, order: ReadOrder, landed: Landed) -> TcpReading:
        reading = TcpReading()
        self._tasks.start_soon(self._run, order, landed, reading)
        return reading

    def forget(self, peer: PeerKey) -> None:
        for connection in self._idle.pop(peer, []):
            connection.close()

    async def stop(self) -> None:
        for peer in list(self._idle):
            self.forget(peer)

    async def _run(self, order: ReadOrder, landed: Landed, reading: TcpReading) -> None:
        failure: str | None = "stopped"
        try:
            with reading.scope:
                failure = None
                await self._read(order, landed)
        except (ReadFailed, LinkLost, OSError, ProtocolError) as error:
            failure = str(error) or type(error).__name__
        finally:
            reading.end("stopped" if reading.scope.cancelled_caught else failure)

    async def _read(self, order: ReadOrder, landed: Landed) -> None:
        peer, ticket = PeerKey.of(order.ticket), order.ticket
        request = ReadBlocks(ticket.epoch, ticket.lease_id, ticket.capability, order.indexes.astype("<i4").tobytes())
        connection = await self._request(peer, frame(0, request))
        try:
            num_bytes = await _reply(connection)
            expected = order.targets.size * self._memory.block_bytes
            if num_bytes != expected:
                raise ProtocolError(f"{num_bytes} bytes are coming where {expected} were asked for")
            await self._receive(connection, order, landed)
        except BaseException:
            connection.close()
            raise
        idle = self._idle.setdefault(peer, [])
        if len(idle) < MAX_IDLE_PER_PEER:
            idle.append(connection)
        else:
            connection.close()

    async def _request(self, peer: PeerKey, data: bytes) -> socket.socket:
        """A connection on which the request is under way: an idle one that still lives, else a new one."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(peer, [])
        while idle:
            connection = idle.pop()
            if _lives(connection):
                break
            connection.close()
        else:
            connection = await open_socket(peer.host, peer.port)
        try:
            await loop.sock_sendall(connection, data)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _receive(self, connection: socket.socket, order: ReadOrder, landed: Landed) -> None:
        """Fills the targets; each piece is verified on a thread while the next one arrives."""
        blocks_per_piece = max(1, PIECE_BYTES // self._memory.block_bytes)
        reported = 0
        failure: Exception | None = None
        async with anyio.create_task_group() as checks:
            try:
                for first, last in _spans(order, blocks_per_piece):
                    await _fill(connection, self._memory.span(int(order.targets[first]), last - first))
                    if last - reported >= blocks_per_piece or last == order.targets.size:
                        checks.start_soon(partial(to_thread.run_sync, landed, reported, last, limiter=self._hashing))
                        reported = last
            except (ReadFailed, OSError) as error:  # not through the task group, which would wrap it
                failure = error
        if failure is not None:
            raise failure


def _spans(order: ReadOrder, most: int) -> Iterator[tuple[int, int]]:
    """[first, last) positions whose targets are neighbours in the pool, `most` blocks at a time."""
    for start, length in runs(order.targets):
        for first in range(start, start + length, most):
            yield first, min(first + most, start + length)


def _lives(connection: socket.socket) -> bool:
    """An idle connection has nothing to read; end of file or stray bytes mean that it is of no use."""
    with contextlib.suppress(BlockingIOError):
        try:
            connection.recv(1)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        return False
    return True


async def _fill(connection: socket.socket, view: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while view:
        received = await loop.sock_recv_into(connection, view)
        if not received:
            raise ReadFailed("the peer closed the connection in the middle of the blocks")
        view = view[received:]


async def _reply(connection: socket.socket) -> int:
    """The number of raw bytes that follow."""
    header = bytearray(HEADER.size)
    await _fill(connection, memoryview(header))
    length, _ = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes")
    body = bytearray(length)
    await _fill(connection, memoryview(body))
    match decode_reply(bytes(body)):
        case BlocksFollow(num_bytes=num_bytes):
            return num_bytes
        case LeaseRefused(reason=reason):
            raise ReadFailed(f"refused: {reason}")
        case other:
            raise ProtocolError(f"a {type(other).__name__} in answer to ReadBlocks")
