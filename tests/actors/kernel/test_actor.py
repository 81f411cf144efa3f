from __future__ import annotations

from typing import ClassVar

import anyio
import anyio.lowlevel
import pytest

from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.errors import ActorGone
from tests.actors.kernel.support import Echo, Fail, Gated, Said, Say, within


class Recorder(Actor[Say]):
    """Writes down every call of the kernel."""

    mailbox_size: ClassVar[int] = 3

    def __init__(self, name: str = "recorder", calls: list[str] | None = None) -> None:
        super().__init__(name)
        self.calls = [] if calls is None else calls
        self.go = anyio.Event()

    async def started(self) -> None:
        self.calls.append(f"{self.name} started")

    async def receive(self, message: Say, reply: Reply) -> None:
        if message.number == 0:
            await self.go.wait()
        self.calls.append(f"{self.name} {message.number}")

    async def settled(self) -> None:
        self.calls.append(f"{self.name} settled")

    async def stopped(self) -> None:
        self.calls.append(f"{self.name} stopped")


@within(5)
async def test_settled_follows_mailbox_size_messages_or_the_last_that_waits() -> None:
    """Mailbox of 3, messages 0 to 6 in one go: settled after 3, after 3 more, and after the last."""
    async with ActorSystem() as system:
        recorder = Recorder()
        address = await system.start(recorder)

        async def send() -> None:
            for number in range(7):
                await address.tell(Say(number))

        async with anyio.create_task_group() as senders:
            senders.start_soon(send)
            while len(recorder.mailbox) < 3:
                await anyio.lowlevel.checkpoint()
            recorder.go.set()  # 0 is being handled, 1 to 3 are in the mailbox, and the sender waits with 4
    assert recorder.calls == [
        f"recorder {call}"
        for call in ("started", *("0", "1", "2", "settled"), *("3", "4", "5", "settled"), *("6", "settled"), "stopped")
    ]


class Background(Actor[Say]):
    async def started(self) -> None:
        self.tasks.start_soon(self._fail_when_told)
        self.told = anyio.Event()

    async def receive(self, message: Say, reply: Reply) -> None:
        self.told.set()
        self.kept = reply

    async def _fail_when_told(self) -> None:
        await self.told.wait()
        raise KeyError("in the background")


class FailsSettled(Echo):
    async def settled(self) -> None:
        raise KeyError("in settled")


@pytest.mark.parametrize(
    ("actor", "text"), [(Background("failing"), "in the background"), (FailsSettled("failing"), "in settled")]
)
@within(5)
async def test_an_actor_whose_task_or_settled_raises_ends_and_wakes_the_owner(actor: Actor[Say], text: str) -> None:
    async with ActorSystem() as system:
        other = await system.start(Echo("other"))
        failing = await system.start(actor)
        if isinstance(actor, Background):
            with pytest.raises(ActorGone, match=f"it failed: KeyError: '{text}'"):
                await failing.ask(Say(1), 3600)
        else:
            await failing.tell(Say(1))
        await system.wait_failed()
        assert isinstance(system.failure, KeyError)
        assert system.failure.args == (text,)
        assert await other.ask(Say(5), 5) == Said(5)  # the others go on until the owner decides
        assert set(system.health()) == {"other"}


@within(5)
async def test_the_first_failure_is_the_one_recorded() -> None:
    async with ActorSystem() as system:
        first, second = await system.start(Echo("first")), await system.start(Echo("second"))
        await first.tell(Fail("one"))
        await system.wait_failed()
        with pytest.raises(ActorGone, match="two"):
            await second.ask(Fail("two"), 5)
    assert repr(system.failure) == "ValueError('one')"


class FailsToStart(Echo):
    async def started(self) -> None:
        raise OSError("no device")


@within(5)
async def test_start_raises_what_started_raised() -> None:
    async with ActorSystem() as system:
        with pytest.raises(OSError, match="no device"):
            await system.start(FailsToStart("broken"))
        assert repr(system.failure) == "OSError('no device')"
        assert system.health() == {}
        await system.start(Echo("broken"))  # its name is free again


@within(5)
async def test_names_are_unique_among_the_living() -> None:
    async with ActorSystem() as system:
        await system.start(Echo("one"))
        with pytest.raises(ValueError, match="'one' is running already"):
            await system.start(Echo("one"))


@within(5)
async def test_stop_handles_what_is_in_the_mailbox_and_refuses_the_rest() -> None:
    async with ActorSystem() as system:
        gated = Gated()
        address = await system.start(gated)
        await address.tell(Say(1))
        await gated.taken.wait()
        await address.tell(Say(2))
        await address.tell(Say(3))
        refused: list[str] = []

        async def send_without_room() -> None:
            with pytest.raises(ActorGone) as gone:
                await address.tell(Say(4))
            refused.append(gone.value.reason)
            gated.gate.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_without_room)
            await anyio.lowlevel.checkpoint()
            await system.stop(address, 5)
        assert gated.numbers == [1, 2, 3]
        assert gated.was_stopped
        assert refused == ["it is stopping"]
        with pytest.raises(ActorGone, match="it is stopping"):
            await address.tell(Say(5))
        await system.stop(address, 5)  # a second time is fine
    assert system.failure is None


@within(5)
async def test_after_the_deadline_the_actor_is_cancelled_and_its_askers_told() -> None:
    async with ActorSystem() as system:
        gated = Gated()
        address = await system.start(gated)
        outcome: list[str] = []

        async def ask() -> None:
            with pytest.raises(ActorGone) as gone:
                await address.ask(Say(1), 3600)
            outcome.append(gone.value.reason)

        async with anyio.create_task_group() as askers:
            askers.start_soon(ask)
            await gated.taken.wait()
            await system.stop(address, 0.05)
            assert gated.was_stopped
    assert outcome == ["it was stopped"]
    assert system.failure is None


class Restless(Echo):
    ticking = False

    async def started(self) -> None:
        self.tasks.start_soon(self._tick)

    async def _tick(self) -> None:
        self.ticking = True
        try:
            await anyio.sleep_forever()
        finally:
            self.ticking = False

    async def stopped(self) -> None:
        assert not self.ticking


@within(5)
async def test_the_tasks_of_an_actor_end_with_its_last_message() -> None:
    async with ActorSystem() as system:
        restless = Restless()
        await system.start(restless)
        assert await restless.address.ask(Say(1), 5) == Said(1)
        assert restless.ticking
        await system.stop(restless.address, 3600)
    assert system.failure is None


class StopsSlowly(Echo):
    stop_seconds = 0.05

    async def stopped(self) -> None:
        await anyio.sleep_forever()


@within(2)
async def test_clean_up_has_a_deadline_of_its_own() -> None:
    async with ActorSystem() as system:
        await system.start(StopsSlowly())


@within(5)
async def test_leaving_stops_in_reverse_order_of_start_what_waits_first() -> None:
    calls: list[str] = []
    async with ActorSystem() as system:
        for name in ("a", "b", "c"):
            address = await system.start(Recorder(name, calls))
            await address.tell(Say(1))
    assert [call for call in calls if call.endswith("stopped")] == ["c stopped", "b stopped", "a stopped"]
    for name in ("a", "b", "c"):
        mine = [call for call in calls if call.startswith(name)]
        assert mine == [f"{name} started", f"{name} 1", f"{name} settled", f"{name} stopped"]


@within(5)
async def test_all_together_have_one_deadline() -> None:
    async with ActorSystem(stop_seconds=0.2) as system:
        stuck = [Gated("one"), Gated("two"), Gated("three")]
        for actor in stuck:
            address = await system.start(actor)
            await address.tell(Say(1))
            await actor.taken.wait()
        before = anyio.current_time()
    assert 0.19 <= anyio.current_time() - before < 0.55  # not three times 0.2
    assert all(actor.was_stopped for actor in stuck)


@within(5)
async def test_when_the_surroundings_are_cancelled_actors_still_stop_in_order() -> None:
    calls: list[str] = []
    with anyio.CancelScope() as surroundings:
        async with ActorSystem() as system:
            for name in ("a", "b"):
                address = await system.start(Recorder(name, calls))
            address.tell_nowait(Say(1))
            surroundings.cancel()
            await anyio.sleep_forever()
    assert surroundings.cancelled_caught
    assert calls == ["a started", "b started", "b 1", "b settled", "b stopped", "a stopped"]


async def test_what_the_body_raises_comes_out_as_it_is() -> None:
    async def body() -> None:
        async with ActorSystem() as system:
            await system.start(Echo())
            raise ConnectionError("mine")

    with pytest.raises(ConnectionError, match="mine"):
        await body()


class Teller(Actor[Say]):
    """Goes on telling until the other is gone, in the background."""

    def __init__(self, name: str, other: Address[Say]) -> None:
        super().__init__(name)
        self.other = other
        self.told = anyio.Event()
        self.ended = anyio.Event()

    async def started(self) -> None:
        self.tasks.start_soon(self._tell)

    async def _tell(self) -> None:
        while True:
            await self.other.tell(Say(1))
            self.told.set()
            await anyio.lowlevel.checkpoint()

    async def stopped(self) -> None:
        self.ended.set()


class OutlivesTeller(Echo):
    """Its last word waits until the one that tells it has ended, so that one ends while only the system is stopping."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.teller: Teller | None = None

    async def stopped(self) -> None:
        assert self.teller is not None
        await self.teller.ended.wait()


@within(5)
async def test_that_another_was_stopped_first_is_no_failure_while_the_system_stops() -> None:
    async with ActorSystem() as system:
        later = OutlivesTeller("later")
        later.teller = teller = Teller("earlier", later.address)
        await system.start(teller)
        await system.start(later)
        await teller.told.wait()
    assert system.failure is None


@within(5)
async def test_that_another_was_stopped_is_a_failure_while_the_system_runs() -> None:
    async with ActorSystem() as system:
        later = Echo("later")
        await system.start(Teller("earlier", later.address))
        await system.start(later)
        await system.stop(later.address, 5)
        await system.wait_failed()
    assert isinstance(system.failure, ActorGone)
    assert system.failure.actor == "later"
