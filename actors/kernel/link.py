"""One Unix stream socket between two processes, over which each reaches the actors that the other exposes.

Both sides call `expose` for each of their actors before `run`, and `address` for each of the other's. Frames are in
frames.py, the sending side's credit in remote.py. Invariants: whatever waits on the other process (ask, tell, ping)
ends with ActorGone the moment the socket is lost; messages of one sender keep their order; what is sent in one turn of
the event loop goes out in one system call.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import types
import typing
from typing import Any

import anyio
import msgspec

from actors.kernel.address import Address, LocalAddress
from actors.kernel.frames import Frame, FrameReader, Kind, ProtocolError, pack
from actors.kernel.mailbox import Envelope
from actors.kernel.remote import RemoteAddress
from actors.kernel.reply import Asker, Reply
from actors.kernel.wakeup import Wakeup
from actors.messages.errors import ActorFailed, ActorGone, ErrorMessage, KvyardError
from actors.messages.supervision import Ping, Pong

logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_error_decoder = msgspec.msgpack.Decoder(ErrorMessage)
_text_decoder = msgspec.msgpack.Decoder(str)
_FLUSH_SECONDS = 1.0  # what was sent before the link is closed from this side still goes out, if the peer reads


class Link:
    def __init__(self, socket: sockets.socket, peer: str) -> None:
        """`peer` names the other process in errors. The link owns the socket from now on."""
        socket.setblocking(False)
        self.peer = peer
        self.lost: str | None = None  # why the link has ended
        self._socket = socket
        self._running = False
        self._exposed: dict[bytes, _Exposed] = {}
        self._remotes: dict[bytes, RemoteAddress[Any]] = {}
        self._gone: dict[bytes, str] = {}  # remote actors known to have ended
        self._asks: dict[int, tuple[Asker, str, msgspec.msgpack.Decoder[Any]]] = {}
        self._next_ask = 1
        self._outgoing: list[bytes] = []
        self._unsent = memoryview(b"")
        self._wakeup = Wakeup()

    def expose(self, address: Address[Any], accepts: Any, replies: Any) -> None:
        """Lets the other process send the Structs of the union `accepts`; answers are of the union `replies`.

        Before `run`. Pings are always accepted.
        """
        if not isinstance(address, LocalAddress):
            raise TypeError(f"{address.name!r} is not an actor of this process")
        if self._running:
            raise RuntimeError("expose every actor before the link runs: its peer may send at once")
        name = address.name.encode()
        if name in self._exposed:
            raise ValueError(f"{address.name!r} is exposed already")
        self._exposed[name] = exposed = _Exposed(self, address, accepts, replies)
        address.mailbox.when_gone(exposed.gone)

    def address(self, name: str, sends: Any, replies: Any, window: int) -> RemoteAddress[Any]:
        """The other process's actor `name`. `window` must be its mailbox's size or less; once per name."""
        wire_name = name.encode()
        if wire_name in self._remotes:
            raise ValueError(f"{name!r} has an address on this link already: they would share one window")
        answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(replies)
        remote: RemoteAddress[Any] = RemoteAddress(self, name, _members(sends), answers, window)
        self._remotes[wire_name] = remote
        reason = self.lost or self._gone.get(wire_name)
        if reason is not None:
            remote.close(reason)
        return remote

    async def run(self) -> None:
        """Until the other side closes or breaks the protocol (`lost` says which), or the caller is cancelled."""
        self._running = True
        reason = "this process has closed the link"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write)
                try:
                    reason = await self._read()
                except ProtocolError as error:
                    reason = str(error)
                    logger.error("link_protocol_error peer=%s error=%s", self.peer, reason)
                    self.send(pack(Kind.BROKEN, body=_encoder.encode(reason)))
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_FLUSH_SECONDS, shield=True):
                await self._flush()
            self._lose(reason)

    # What remote addresses and exposed actors use.

    def send(self, frame: bytes) -> None:
        if self.lost is None:
            self._outgoing.append(frame)
            self.wake()

    def wake(self) -> None:
        self._wakeup.wake()

    def open_ask(self, asker: Asker, actor: str, answers: msgspec.msgpack.Decoder[Any]) -> int:
        number = self._next_ask
        self._next_ask += 1
        self._asks[number] = (asker, actor, answers)
        return number

    def forget_ask(self, number: int) -> bool:
        """Whether nothing had ended it."""
        return self._asks.pop(number, None) is not None

    # Writing.

    async def _write(self) -> None:
        while True:
            await self._flush()
            if not self._outgoing and not any(exposed.credit for exposed in self._exposed.values()):
                await self._wakeup.wait()

    async def _flush(self) -> None:
        """Writes everything that waits; gives up silently when the socket is gone, which the reader sees."""
        while True:
            if not self._unsent:
                for name, exposed in self._exposed.items():
                    if exposed.credit:
                        self._outgoing.append(pack(Kind.CREDIT, name=name, number=exposed.credit))
                        exposed.credit = 0
                if not self._outgoing:
                    return
                self._unsent = memoryview(b"".join(self._outgoing))
                self._outgoing.clear()
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError:
                self._unsent = memoryview(b"")
                self._outgoing.clear()
                return

    # Reading.

    async def _read(self) -> str:
        """Returns why nothing more comes. Raises ProtocolError."""
        loop, reader = asyncio.get_running_loop(), FrameReader()
        ended: asyncio.Future[str] = loop.create_future()

        def readable() -> None:
            if ended.done():
                return
            try:
                reason = self._receive(reader)
            except Exception as error:
                ended.set_exception(error)
            else:
                if reason is not None:
                    ended.set_result(reason)

        # Watched all the time: to begin and end it for every message costs two system calls and a turn of the loop.
        loop.add_reader(self._socket.fileno(), readable)
        try:
            return await ended
        finally:
            loop.remove_reader(self._socket.fileno())

    def _receive(self, reader: FrameReader) -> str | None:
        """What is there now. Returns why nothing more comes, None while more may. Raises ProtocolError."""
        try:
            count = self._socket.recv_into(reader.room())
        except BlockingIOError:
            return None
        except ConnectionResetError:
            count = 0  # it has closed before it had read everything
        except OSError as error:
            return f"the socket to {self.peer} failed: {error}"
        if count == 0:
            return f"{self.peer} has ended or closed the link"
        reader.received(count)
        while (frame := reader.next_frame()) is not None:
            if frame.kind is Kind.BROKEN:
                return f"{self.peer} ended the link: {_decode(_text_decoder, frame)}"
            self._dispatch(frame)
        return None

    def _dispatch(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.ANSWER or kind is Kind.FAILURE:
            self._answered(frame)
        elif kind is Kind.CREDIT:
            if (remote := self._remotes.get(frame.name)) is None:
                raise ProtocolError(f"credit for {frame.name!r}, which was never sent anything")
            remote.credit_returned(frame.number)
        elif kind is Kind.GONE:
            reason = self._gone[frame.name] = _decode(_text_decoder, frame)
            if (remote := self._remotes.get(frame.name)) is not None:
                remote.close(reason)
        elif (exposed := self._exposed.get(frame.name)) is None:
            raise ProtocolError(f"{frame.name!r} is no actor that this process exposes to {self.peer}")
        else:
            exposed.received(frame)

    def _answered(self, frame: Frame) -> None:
        waiting = self._asks.pop(frame.number, None)
        if waiting is None:
            return  # the asker has gone
        asker, _, answers = waiting
        if frame.kind is Kind.ANSWER:
            asker.end(_decode(answers, frame), None)
        else:
            message: ErrorMessage = _decode(_error_decoder, frame)
            try:
                error = message.exception()
            except (KeyError, ValueError) as wrong:
                raise ProtocolError(f"{message} is no error that can be raised: {wrong!r}") from wrong
            asker.end(None, error)

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self._socket.close()
        asks, self._asks = self._asks, {}
        for asker, actor, _ in asks.values():
            asker.end(None, ActorGone(actor, reason))
        for remote in self._remotes.values():
            remote.close(reason)


class _Exposed:
    """One actor of this process as the other one sees it."""

    def __init__(self, link: Link, address: LocalAddress[Any], accepts: Any, replies: Any) -> None:
        self.credit = 0  # messages taken since the last write
        self._link = link
        self._mailbox = address.mailbox
        self._name = address.name.encode()
        self._messages: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(accepts)
        self._replies = (*_members(replies), Pong)
        self._waiting = 0  # messages in the mailbox that this link brought

    def received(self, frame: Frame) -> None:
        asker = None if frame.kind is Kind.TELL else _RemoteAsker(self, frame.number)
        if frame.kind is Kind.PING:
            message, taken = Ping(), _nothing
        else:
            message, taken = _decode(self._messages, frame), self._taken
            self._waiting += 1
            if self._waiting > self._mailbox.size:
                raise ProtocolError(
                    f"more than {self._mailbox.size} messages for {self._mailbox.name!r} without credit"
                )
        if self._mailbox.gone is not None:
            # The sender of a tell has been told by GONE, which crossed this message on its way.
            if asker is not None:
                asker.end(None, ActorGone(self._mailbox.name, self._mailbox.gone))
            return
        reply = Reply() if asker is None else self._mailbox.asks.open(asker)
        self._mailbox.deliver(Envelope(message, reply, taken))

    def _taken(self) -> None:
        self._waiting -= 1
        self.credit += 1
        self._link.wake()

    def gone(self, reason: str) -> None:
        self._link.send(pack(Kind.GONE, name=self._name, body=_encoder.encode(reason)))

    def answer(self, number: int, value: object, error: KvyardError | None) -> None:
        name = self._mailbox.name
        wrong: Exception | None = None
        if error is None:
            try:
                if not isinstance(value, self._replies):
                    raise TypeError(f"{type(value).__name__} is no answer that {name!r} may send over a link")
                self._link.send(pack(Kind.ANSWER, number=number, body=_encoder.encode(value)))
                return
            except (TypeError, ValueError) as raised:
                wrong, error = raised, ActorFailed(name, str(raised))
        self._link.send(pack(Kind.FAILURE, number=number, body=_encoder.encode(ErrorMessage.of(name, error))))
        if wrong is not None:
            raise wrong


class _RemoteAsker:
    """A task of the other process that waits for an answer."""

    __slots__ = ("_exposed", "_number")

    def __init__(self, exposed: _Exposed, number: int) -> None:
        self._exposed = exposed
        self._number = number

    def end(self, value: object, error: KvyardError | None) -> None:
        self._exposed.answer(self._number, value, error)


def _nothing() -> None:
    """A ping takes no credit."""


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: Frame) -> Any:
    try:
        return decoder.decode(frame.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a frame of kind {frame.kind.name} cannot be decoded: {error}") from error


def _members(union: Any) -> tuple[type, ...]:
    """The classes of a union (or of one type), for isinstance."""
    if isinstance(union, types.UnionType) or typing.get_origin(union) is typing.Union:
        return tuple(member for part in typing.get_args(union) for member in _members(part))
    return (types.NoneType if union is None else typing.get_origin(union) or union,)
