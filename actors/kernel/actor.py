"""What an actor is to whoever writes one: a name, a mailbox, and four methods that the kernel calls one at a time.

life.py runs it, system.py owns it. Invariant: nobody but the actor's own methods and tasks touches its state.
"""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from anyio.abc import TaskGroup

from actors.kernel.address import LocalAddress
from actors.kernel.mailbox import Mailbox
from actors.kernel.reply import Reply

M = TypeVar("M")


class Actor(Generic[M]):
    """`M` is the union of the messages it receives."""

    mailbox_size: ClassVar[int] = 256
    stop_seconds: ClassVar[float] = 5.0  # how long `stopped` may take
    tasks: TaskGroup  # its own, from started() on; cancelled when it has handled its last message

    def __init__(self, name: str) -> None:
        self.name = name
        self.mailbox: Mailbox[M] = Mailbox(name, self.mailbox_size)
        self.address: LocalAddress[M] = LocalAddress(self.mailbox)

    async def started(self) -> None:
        """Before the first message. `ActorSystem.start` returns when this has, and raises what this raises."""

    async def receive(self, message: M, reply: Reply) -> None:
        """One message at a time. Raising ends the actor, and with it its engine."""
        raise NotImplementedError

    async def settled(self) -> None:
        """After one or more messages, when none waits or `mailbox_size` have been handled: act on their sum."""

    async def stopped(self) -> None:
        """The last word: after the last message and after its tasks have ended, whatever the reason. Cannot be
        cancelled from outside; `stop_seconds` bounds it. A reply still kept may be answered here after an orderly
        stop; after a failure all of them have failed already."""
