"""An actor of the process at the other end of a link: its address, and its credit window.

Invariant: at most `window` messages have been sent that the actor has not taken. A sender without credit waits (or is
refused with MailboxFull) in the order it came, so messages of one sender keep their order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import msgspec

from actors.kernel.frames import Kind, pack
from actors.kernel.reply import Asker, WaitingTask
from actors.messages.errors import ActorGone, AskTimeout, MailboxFull
from actors.messages.supervision import Pong

if TYPE_CHECKING:
    from actors.kernel.link import Link

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_pong_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Pong)


class _WaitingSender:
    __slots__ = ("ended", "frame", "refused")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.ended = anyio.Event()
        self.refused = False


class RemoteAddress(Generic[M]):
    """Made by `Link.address`. A tell that has returned is on its way; only an answered ask has surely arrived."""

    def __init__(
        self,
        link: Link,
        name: str,
        sends: tuple[type, ...],
        answers: msgspec.msgpack.Decoder[Any],
        window: int,
    ) -> None:
        if window < 1:
            raise ValueError(f"the window of {name!r} is {window}: at least 1")
        self.name = name
        self.gone: str | None = None  # why nothing is accepted any more
        self._link = link
        self._wire_name = name.encode()
        self._sends = sends
        self._answers = answers
        self._window = window
        self._credit = window
        self._senders: deque[_WaitingSender] = deque()

    async def tell(self, message: M) -> None:
        """Raises ActorGone; TypeError for a message that this address does not send; ValueError over 64 MiB."""
        await self._send(self._pack(Kind.TELL, 0, message))

    def tell_nowait(self, message: M) -> None:
        """Raises MailboxFull too."""
        frame = self._pack(Kind.TELL, 0, message)
        self._check_open()
        if self._credit == 0:
            raise MailboxFull(self.name, self._window)
        self._credit -= 1
        self._link.send(frame)

    async def ask_for(self, message: M, asker: Asker) -> None:
        number = self._link.open_ask(asker, self.name, self._answers)
        try:
            await self._send(self._pack(Kind.ASK, number, message))
        except ActorGone as gone:
            if self._link.forget_ask(number):
                asker.end(None, gone)
        except BaseException:
            self._link.forget_ask(number)
            raise

    async def ask(self, message: M, seconds: float) -> Any:
        """Raises ActorGone, AskTimeout, or the typed error replied."""
        asker = WaitingTask()
        number = self._link.open_ask(asker, self.name, self._answers)
        try:
            with anyio.move_on_after(seconds):
                await self._send(self._pack(Kind.ASK, number, message))
                return await asker.answer()
        finally:
            self._link.forget_ask(number)
        raise AskTimeout(self.name, type(message).__name__, seconds)

    def ping(self, asker: Asker) -> None:
        if self.gone is not None:
            asker.end(None, ActorGone(self.name, self.gone))
            return
        number = self._link.open_ask(asker, self.name, _pong_decoder)
        self._link.send(pack(Kind.PING, name=self._wire_name, number=number))

    def credit_returned(self, count: int) -> None:
        self._credit += count
        while self._senders and self._credit > 0:
            sender = self._senders.popleft()
            self._credit -= 1
            self._link.send(sender.frame)
            sender.ended.set()

    def close(self, reason: str) -> None:
        """Nothing more is accepted: senders that wait, and later ones, get ActorGone."""
        if self.gone is not None:
            return
        self.gone = reason
        senders, self._senders = self._senders, deque()
        for sender in senders:
            sender.refused = True
            sender.ended.set()

    async def _send(self, frame: bytes) -> None:
        self._check_open()
        if self._credit > 0:
            self._credit -= 1
            self._link.send(frame)
            return
        sender = _WaitingSender(frame)
        self._senders.append(sender)
        try:
            await sender.ended.wait()
        except BaseException:
            if not sender.ended.is_set():
                self._senders.remove(sender)
            raise
        if sender.refused:
            self._check_open()

    def _check_open(self) -> None:
        if self.gone is not None:
            raise ActorGone(self.name, self.gone)

    def _pack(self, kind: Kind, number: int, message: M) -> bytes:
        if not isinstance(message, self._sends):
            raise TypeError(f"{type(message).__name__} is no message that may be sent to {self.name!r}")
        return pack(kind, name=self._wire_name, number=number, body=_encoder.encode(message))

    def __repr__(self) -> str:
        return f"RemoteAddress({self.name!r})"
