"""Two ends of a link in one event loop: what the tests of link.py need."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from actors.kernel.actor import Actor
from actors.kernel.link import Link
from actors.kernel.remote import RemoteAddress
from actors.kernel.system import ActorSystem
from tests.actors.kernel.support import Echo, Gated, Message, Said, Say


class Pair:
    """`here` asks the actors that `there` exposes; both links run in task groups of their own."""

    def __init__(self, system: ActorSystem, here: Link, there: Link) -> None:
        self.system, self.here, self.there = system, here, there
        self.here_scope, self.there_scope = anyio.CancelScope(), anyio.CancelScope()
        self.here_ended, self.there_ended = anyio.Event(), anyio.Event()

    async def run_here(self) -> None:
        with self.here_scope:
            await self.here.run()
        self.here_ended.set()

    async def run_there(self) -> None:
        with self.there_scope:
            await self.there.run()
        self.there_ended.set()

    def echo(self, window: int = 256) -> RemoteAddress[Message]:
        return self.here.address("echo", Message, Said | None, window)

    def gated(self, window: int = 2) -> RemoteAddress[Say]:
        return self.here.address("gated", Say, Said, window)


@asynccontextmanager
async def linked(*actors: Actor[Any]) -> AsyncIterator[Pair]:
    """Links an empty process to one that has these actors (Echo, Gated)."""
    ours, theirs = socket.socketpair()
    async with anyio.create_task_group() as tasks, ActorSystem() as system:
        pair = Pair(system, Link(ours, "there"), Link(theirs, "here"))
        for actor in actors:
            await system.start(actor)
            accepts: Any = {Echo: Message, Gated: Say}.get(type(actor), Message)
            pair.there.expose(actor.address, accepts, Said | None)
        tasks.start_soon(pair.run_here)
        tasks.start_soon(pair.run_there)
        yield pair
        pair.here_scope.cancel()
        await pair.there_ended.wait()
