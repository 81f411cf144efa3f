"""The socket is cut after a random number of bytes, mid-frame or not: everything that waits ends, and nothing hangs."""

from __future__ import annotations

import random
import socket

import anyio
import pytest

from actors.kernel.link import Link
from actors.kernel.system import ActorSystem
from actors.messages.errors import ActorGone
from tests.actors.kernel.support import Echo, Gated, Message, Said, Say, within


async def forward(source: socket.socket, target: socket.socket, limit: int, chance: random.Random) -> None:
    """Passes on `limit` bytes in random pieces, then returns; returns at once when either end is gone."""
    while limit > 0:
        try:
            await anyio.wait_readable(source)
            data = source.recv(min(limit, chance.randint(1, 3000)))
            if not data:
                return
            limit -= len(data)
            while data:
                await anyio.wait_writable(target)
                data = data[target.send(data) :]
        except OSError:
            return


async def cut_after(
    a: socket.socket, b: socket.socket, forth: int, back: int, chance: random.Random, *, done: anyio.Event
) -> None:
    """A wire between `a` and `b` that breaks when either direction has carried its bytes."""

    async def carry(source: socket.socket, target: socket.socket, limit: int) -> None:
        await forward(source, target, limit, chance)
        wires.cancel_scope.cancel()

    async with anyio.create_task_group() as wires:
        wires.start_soon(carry, a, b, forth)
        wires.start_soon(carry, b, a, back)
    a.close()
    b.close()
    done.set()


@pytest.mark.parametrize("seed", range(40))
@within(10)
async def test_every_ask_and_tell_ends_when_the_socket_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    answered: list[int] = []
    gone: list[tuple[int, str]] = []
    cut = anyio.Event()
    async with anyio.create_task_group() as links, ActorSystem() as system:
        here, there = Link(ours, "there"), Link(theirs, "here")
        echo_actor, gated_actor = Echo(), Gated()
        there.expose((await system.start(echo_actor)), Message, Said)
        there.expose((await system.start(gated_actor)), Say, Said)
        echo = here.address("echo", Message, Said, chance.choice([1, 3, 256]))
        gated = here.address("gated", Say, Said, 2)

        async def ask_until_gone(asker: int) -> None:
            number = asker * 100_000
            while True:
                number += 1
                data = bytes(chance.choice([0, 10, 10_000]))
                try:
                    if chance.random() < 0.3:
                        await echo.tell(Say(number, data))
                    else:
                        # An hour: a lost answer would hang here, and the test would run into its own deadline.
                        assert await echo.ask(Say(number, data), 3600) == Said(number, data)
                        answered.append(number)
                except ActorGone as error:
                    gone.append((asker, error.actor))
                    return

        async def never_answered() -> None:
            with pytest.raises(ActorGone):
                await gated.ask(Say(1), 3600)

        async def wire() -> None:
            forth, back = chance.randint(0, 60_000), chance.randint(0, 60_000)
            await cut_after(near, far, forth, back, chance, done=cut)

        async with anyio.create_task_group() as tasks:
            links.start_soon(here.run)
            links.start_soon(there.run)
            tasks.start_soon(wire)
            for asker in range(6):
                tasks.start_soon(ask_until_gone, asker)
            for _ in range(4):
                tasks.start_soon(never_answered)
        assert cut.is_set()
        assert sorted(gone) == [(asker, "echo") for asker in range(6)]
        assert here.lost is not None
        gated_actor.gate.set()
    assert there.lost is not None
    assert system.failure is None  # answers to a lost asker are no error
    for asker in range(6):
        mine = [number for number in echo_actor.numbers if number // 100_000 == asker]
        assert mine == list(
            range(asker * 100_000 + 1, asker * 100_000 + 1 + len(mine))
        )  # in order, none twice, no hole
    assert set(answered) <= set(echo_actor.numbers)
