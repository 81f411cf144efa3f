"""How an actor is reached: the same face for a mailbox of this process and for one behind a link (link.py)."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import anyio

from actors.kernel.mailbox import Envelope, Mailbox
from actors.kernel.reply import Asker, Reply, WaitingTask
from actors.messages.errors import ActorGone, AskTimeout
from actors.messages.supervision import Ping

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Address(Protocol[M_contra]):
    """Messages of one sender arrive in the order they were sent."""

    @property
    def name(self) -> str: ...

    async def tell(self, message: M_contra) -> None:
        """Waits while the mailbox is full. Raises ActorGone."""

    def tell_nowait(self, message: M_contra) -> None:
        """Raises MailboxFull, ActorGone."""

    async def ask_for(self, message: M_contra, asker: Asker) -> None:
        """A tell that is answered: `asker.end` gets the answer or the error, ActorGone too, whenever it comes."""

    async def ask(self, message: M_contra, seconds: float) -> Any:
        """The answer, within `seconds` (the wait for room in the mailbox included).

        Raises ActorGone, AskTimeout, or the typed error replied.
        """


class Watched(Protocol):
    """What a supervisor can ping."""

    @property
    def name(self) -> str: ...

    def ping(self, asker: Asker) -> None:
        """Puts a Ping behind the messages that wait; `asker.end` gets Pong or ActorGone. Never raises, never waits."""


class LocalAddress(Generic[M]):
    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox

    @property
    def name(self) -> str:
        return self.mailbox.name

    async def tell(self, message: M) -> None:
        await self.mailbox.put(Envelope(message, Reply()))

    def tell_nowait(self, message: M) -> None:
        self.mailbox.put_nowait(Envelope(message, Reply()))

    async def ask_for(self, message: M, asker: Asker) -> None:
        asks = self.mailbox.asks
        reply = asks.open(asker)
        try:
            await self.mailbox.put(Envelope(message, reply))
        except ActorGone as gone:
            asks.end(asker, None, gone)  # unless the mailbox has done so
        except BaseException:
            asks.forget(asker)
            raise

    async def ask(self, message: M, seconds: float) -> Any:
        asks, asker = self.mailbox.asks, WaitingTask()
        try:
            with anyio.move_on_after(seconds):
                await self.mailbox.put(Envelope(message, asks.open(asker)))
                return await asker.answer()
        finally:
            asks.forget(asker)
        raise AskTimeout(self.name, type(message).__name__, seconds)

    def ping(self, asker: Asker) -> None:
        mailbox = self.mailbox
        if mailbox.gone is not None:
            asker.end(None, ActorGone(mailbox.name, mailbox.gone))
            return
        # A ping is no M: the run loop answers it itself and never hands it to receive().
        mailbox.deliver(Envelope(Ping(), mailbox.asks.open(asker), _nothing))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"LocalAddress({self.name!r})"


def _nothing() -> None:
    """Nobody waits for the credit of a ping."""
