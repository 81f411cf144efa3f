from __future__ import annotations

import anyio
import anyio.lowlevel

from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.supervision import Pong
from tests.actors.kernel.support import Answered, Echo, Gated, Say, within


class Clock:
    """Stands still until told. An answered ping reads it, which `read` notices."""

    def __init__(self) -> None:
        self.now = 100.0
        self._read = anyio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now

    async def read(self) -> None:
        self._read = anyio.Event()
        await self._read.wait()


@within(5)
async def test_a_busy_actor_grows_old_and_an_idle_one_does_not() -> None:
    clock = Clock()
    async with ActorSystem(clock=clock, ping_interval=0.005) as system:
        busy = Gated("busy")
        address = await system.start(busy)
        await system.start(Echo("idle"))
        await address.tell(Say(1))
        await busy.taken.wait()
        await clock.read()  # a ping of idle; the one of busy lies in its mailbox
        clock.now = 106.0
        await clock.read()
        await clock.read()
        assert system.health() == {"busy": 6.0, "idle": 0.0}
        for _ in range(5):
            await clock.read()
        assert len(busy.mailbox) == 1  # not a heap of pings
        busy.gate.set()
        while system.health()["busy"] > 0:
            await clock.read()
        assert system.health() == {"busy": 0.0, "idle": 0.0}


@within(5)
async def test_a_ping_is_answered_in_turn_even_through_a_full_mailbox() -> None:
    async with ActorSystem() as system:
        gated = Gated()
        await system.start(gated)
        await gated.address.tell(Say(1))
        await gated.taken.wait()
        await gated.address.tell(Say(2))
        await gated.address.tell(Say(3))  # full
        answered = Answered()
        gated.address.ping(answered)
        await anyio.lowlevel.checkpoint()
        assert not answered.ended.is_set()
        gated.gate.set()
        await answered.ended.wait()
        assert answered.value == Pong(handled=3)
        assert gated.numbers == [1, 2, 3]


class CountsSettled(Actor[Say]):
    settled_calls = 0

    async def receive(self, message: Say, reply: Reply) -> None:
        raise AssertionError("a ping must not come here")

    async def settled(self) -> None:
        self.settled_calls += 1


@within(5)
async def test_a_ping_alone_is_no_work() -> None:
    async with ActorSystem() as system:
        actor = CountsSettled("quiet")
        await system.start(actor)
        answered = Answered()
        actor.address.ping(answered)
        await answered.ended.wait()
        assert answered.value == Pong(handled=0)
    assert actor.settled_calls == 0
    gone = Answered()
    actor.address.ping(gone)
    assert str(gone.error) == "actor 'quiet' is gone: it is stopping"
