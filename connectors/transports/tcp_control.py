"""The control network over TCP: the listener of a lease service, and the client's link.

The link works by readiness callbacks instead of a task, so a round trip costs no task switch, and end of file fails
every open ask at once: that is how a killed peer is noticed within milliseconds. On the serving side one task per
connection answers in order; `ReadBlocks` is answered with a frame and the raw bytes, straight out of the pool.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from actors.messages.lease import BlocksFollow, ControlReply, ControlRequest, LeaseRefused, ReadBlocks
from connectors.transports.face import LeaseService, LinkLost
from connectors.transports.frames import FrameReader, ProtocolError, decode_reply, decode_request, frame

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 1024
_RECEIVE_BYTES = 1 << 16
_SEND_BYTES = 1 << 20  # per system call, so that the loop is never held longer than such a copy takes

log = logging.getLogger(__name__)


async def open_socket(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket. Raises LinkLost."""
    loop = asyncio.get_running_loop()
    failure = "no address"
    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            for family, _, _, _, address in await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                connection = socket.socket(family, socket.SOCK_STREAM)
                try:
                    connection.setblocking(False)
                    _tune(connection)
                    await loop.sock_connect(connection, address)
                except OSError as error:
                    connection.close()
                    failure = error.strerror or str(error)
                except BaseException:
                    connection.close()
                    raise
                else:
                    return connection
    except TimeoutError:
        failure = f"no connection within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        failure = error.strerror or str(error)
    raise LinkLost(f"{host}:{port}: {failure}")


def _tune(connection: socket.socket) -> None:
    """No delay for small frames; a machine that vanished without a word is noticed after about 25 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class TcpLink:
    """One connection to one peer. Any number of asks may be open at once."""

    def __init__(self, connection: socket.socket) -> None:
        self.lost: str | None = None
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._reader, self._outgoing = FrameReader(), bytearray()
        self._asks: dict[int, asyncio.Future[ControlReply]] = {}
        self._next_call = self._last_watcher = 0
        self._watchers: dict[int, Callable[[], None]] = {}
        self._loop.add_reader(connection.fileno(), self._readable)

    async def ask(self, request: ControlRequest) -> ControlReply:
        if self.lost is not None:
            raise LinkLost(self.lost)
        self._next_call = call = (self._next_call + 1) & 0xFFFFFFFF
        answer: asyncio.Future[ControlReply] = self._loop.create_future()
        self._asks[call] = answer
        try:
            self._send(frame(call, request))
            return await answer
        finally:
            self._asks.pop(call, None)

    def on_lost(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.lost is not None:
            call()
            return lambda: None
        self._last_watcher = key = self._last_watcher + 1
        self._watchers[key] = call

        def take_back() -> None:
            self._watchers.pop(key, None)

        return take_back

    def close(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for answer in self._asks.values():
            if not answer.done():
                answer.set_exception(LinkLost(reason))
        self._asks.clear()
        watchers, self._watchers = list(self._watchers.values()), {}
        for call in watchers:
            call()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                self.close("the peer closed the connection")
            for call, body in self._reader.feed(data):
                answer = self._asks.pop(call, None)
                if answer is not None and not answer.done():
                    answer.set_result(decode_reply(body))
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self.close(str(error))

    def _send(self, data: bytes) -> None:
        if not self._outgoing:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self.close(str(error))
                return
            if data:
                self._loop.add_writer(self._socket.fileno(), self._writable)
        self._outgoing += data

    def _writable(self) -> None:
        try:
            del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not self._outgoing:
            self._loop.remove_writer(self._socket.fileno())


class TcpNetwork:
    """Counts what it refused: `malformed` connections closed for a frame that is none."""

    def __init__(self) -> None:
        self.malformed = self.connections = 0

    async def connect(self, host: str, port: int) -> TcpLink:
        return TcpLink(await open_socket(host, port))

    async def listen(self, service: LeaseService, host: str, port: int, tasks: TaskGroup) -> int:
        infos = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(256)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        tasks.start_soon(self._accept, listener, service, tasks)
        return int(listener.getsockname()[1])

    async def _accept(self, listener: socket.socket, service: LeaseService, tasks: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of descriptors: what is open goes on
                    log.warning("accept failed error=%s", error)
                    await anyio.sleep(0.1)
                    continue
                if self.connections >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self.connections += 1
                tasks.start_soon(self._serve, connection, service)

    async def _serve(self, connection: socket.socket, service: LeaseService) -> None:
        loop, reader = asyncio.get_running_loop(), FrameReader()
        with connection:
            try:
                connection.setblocking(False)
                _tune(connection)
                while data := await loop.sock_recv(connection, _RECEIVE_BYTES):
                    for call, body in reader.feed(data):
                        request = decode_request(body)
                        if isinstance(request, ReadBlocks):
                            await _send_blocks(connection, call, request, service)
                        else:
                            await loop.sock_sendall(connection, frame(call, await service.answer(request)))
            except ProtocolError as error:
                self.malformed += 1
                log.warning("control connection closed reason=%s", error)
            except OSError:
                pass  # the reader is gone; its leases end by their deadline
            finally:
                self.connections -= 1


async def _send_blocks(connection: socket.socket, call: int, request: ReadBlocks, service: LeaseService) -> None:
    """Raises OSError when the copy was aborted: its connection ends, so that the reader cannot take half for whole."""
    loop = asyncio.get_running_loop()
    with service.copy(request) as copy:
        if isinstance(copy, LeaseRefused):
            await loop.sock_sendall(connection, frame(call, copy))
            return
        with copy.scope:
            await loop.sock_sendall(connection, frame(call, BlocksFollow(request.lease_id, copy.num_bytes)))
            for piece in copy.pieces():
                for start in range(0, len(piece), _SEND_BYTES):
                    await loop.sock_sendall(connection, piece[start : start + _SEND_BYTES])
                    await checkpoint()
    if copy.scope.cancelled_caught:
        raise OSError("the lease ended while its blocks were being sent")
