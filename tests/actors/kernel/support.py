"""Messages and actors for the kernel's tests."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ClassVar, ParamSpec

import anyio
import msgspec

from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.messages.errors import KvyardError, RefusalReason, RequestRefused

P = ParamSpec("P")


class Say(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Answered with RequestRefused, all its fields set."""


class Ignore(msgspec.Struct, frozen=True, tag=True):
    """Never answered: its reply becomes garbage."""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Its reply is kept until AnswerKept or DropKept."""

    number: int


class AnswerKept(msgspec.Struct, frozen=True, tag=True):
    pass


class DropKept(msgspec.Struct, frozen=True, tag=True):
    pass


class Fail(msgspec.Struct, frozen=True, tag=True):
    text: str


class Said(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


Message = Say | Refuse | Ignore | Keep | AnswerKept | DropKept | Fail
REFUSAL = RequestRefused(RefusalReason.QUEUE_FULL, "too many", param="prompt", retry_after=1.5)


def within(seconds: float) -> Callable[[Callable[P, Awaitable[None]]], Callable[P, Awaitable[None]]]:
    """A test that hangs fails."""

    def decorate(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
        @functools.wraps(test)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> None:
            with anyio.fail_after(seconds):
                await test(*args, **kwargs)

        return limited

    return decorate


class Echo(Actor[Message]):
    """Does what each message's docstring says, and remembers what it was told."""

    def __init__(self, name: str = "echo") -> None:
        super().__init__(name)
        self.numbers: list[int] = []
        self.kept: list[tuple[int, Reply]] = []

    async def receive(self, message: Message, reply: Reply) -> None:
        match message:
            case Say():
                self.numbers.append(message.number)
                reply.send(Said(message.number, message.data))
            case Refuse():
                reply.fail(REFUSAL)
            case Keep():
                self.kept.append((message.number, reply))
            case AnswerKept():
                for number, kept in self.kept:
                    kept.send(Said(number))
                reply.send(None)
            case DropKept():
                self.kept.clear()
                reply.send(None)
            case Fail():
                raise ValueError(message.text)


class Gated(Actor[Say]):
    """Takes a message, says so with `taken`, and answers it when `gate` opens. A mailbox of two."""

    mailbox_size: ClassVar[int] = 2

    def __init__(self, name: str = "gated") -> None:
        super().__init__(name)
        self.gate = anyio.Event()
        self.taken = anyio.Event()
        self.numbers: list[int] = []
        self.was_stopped = False

    async def receive(self, message: Say, reply: Reply) -> None:
        self.taken.set()
        await self.gate.wait()
        self.numbers.append(message.number)
        reply.send(Said(message.number))

    async def stopped(self) -> None:
        self.was_stopped = True


class Answered:
    """An asker that notes what it got."""

    def __init__(self) -> None:
        self.value: object = None
        self.error: KvyardError | None = None
        self.ended = anyio.Event()

    def end(self, value: object, error: KvyardError | None) -> None:
        self.value, self.error = value, error
        self.ended.set()
