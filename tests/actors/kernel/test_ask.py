from __future__ import annotations

import threading

import anyio
import pytest

from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.errors import ActorFailed, ActorGone, AskTimeout, RefusalReason, RequestRefused
from tests.actors.kernel.support import (
    Answered,
    AnswerKept,
    DropKept,
    Echo,
    Fail,
    Gated,
    Ignore,
    Keep,
    Refuse,
    Said,
    Say,
    within,
)


@within(5)
async def test_an_ask_returns_the_value_and_raises_the_typed_error_replied() -> None:
    async with ActorSystem() as system:
        echo = await system.start(Echo())
        assert await echo.ask(Say(7), 5) == Said(7)
        with pytest.raises(RequestRefused) as refused:
            await echo.ask(Refuse(), 5)
    error = refused.value
    assert (error.reason, error.text, error.param, error.retry_after) == (
        RefusalReason.QUEUE_FULL,
        "too many",
        "prompt",
        1.5,
    )


@within(5)
async def test_who_asks_for_another_waits_for_room_only() -> None:
    actor, first, second, late = Gated(), Answered(), Answered(), Answered()
    async with ActorSystem() as system:
        gated = await system.start(actor)
        await gated.ask_for(Say(1), first)
        await gated.ask_for(Say(2), second)
        assert (first.value, second.value) == (None, None)
        actor.gate.set()
        assert await gated.ask(Say(3), 5) == Said(3)
        assert (first.value, second.value) == (Said(1), Said(2))
        await system.stop(gated, 5)
        await gated.ask_for(Say(4), late)
        assert isinstance(late.error, ActorGone)


@within(5)
async def test_no_answer_in_time_is_a_timeout_and_the_late_answer_is_ignored() -> None:
    async with ActorSystem() as system:
        gated = Gated()
        address = await system.start(gated)
        before = anyio.current_time()
        with pytest.raises(AskTimeout) as timeout:
            await address.ask(Say(1), 0.05)
        assert anyio.current_time() - before >= 0.045  # the loop's clock ticks in milliseconds
        assert (timeout.value.actor, timeout.value.message, timeout.value.seconds) == ("gated", "Say", 0.05)
        gated.gate.set()  # the answer to 1 comes now
        assert await address.ask(Say(2), 5) == Said(2)
        assert gated.numbers == [1, 2]
    assert system.failure is None


@within(5)
async def test_the_time_of_an_ask_includes_the_wait_for_room() -> None:
    async with ActorSystem() as system:
        gated = Gated()
        address = await system.start(gated)
        await address.tell(Say(1))
        await gated.taken.wait()
        await address.tell(Say(2))
        await address.tell(Say(3))
        with pytest.raises(AskTimeout):
            await address.ask(Say(4), 0.02)
        gated.gate.set()
    assert gated.numbers == [1, 2, 3]  # 4 never entered the mailbox


@within(5)
async def test_a_reply_that_is_garbage_fails_the_ask_at_once() -> None:
    async with ActorSystem(ping_interval=3600) as system:
        echo = await system.start(Echo())
        with pytest.raises(ActorFailed, match="without an answer"):
            await echo.ask(Ignore(), 3600)


@within(5)
async def test_garbage_is_seen_too_when_it_is_the_last_message_of_a_full_batch() -> None:
    class PairWise(Echo):
        mailbox_size = 2

    async with ActorSystem(ping_interval=3600) as system:
        echo = await system.start(PairWise())
        echo.tell_nowait(Say(1))
        with pytest.raises(ActorFailed, match="without an answer"):
            await echo.ask(Ignore(), 3600)


@within(5)
async def test_kept_replies_are_answered_later_or_fail_when_let_go() -> None:
    async with ActorSystem() as system:
        echo = await system.start(Echo())
        answers: dict[int, object] = {}

        async def ask(number: int) -> None:
            try:
                answers[number] = await echo.ask(Keep(number), 3600)
            except ActorFailed as failed:
                answers[number] = failed.actor

        async with anyio.create_task_group() as askers:
            for number in (1, 2, 3):
                askers.start_soon(ask, number)
            await anyio.lowlevel.checkpoint()
            await echo.ask(AnswerKept(), 5)
        assert answers == {1: Said(1), 2: Said(2), 3: Said(3)}

        async with anyio.create_task_group() as askers:
            askers.start_soon(ask, 4)
            await anyio.lowlevel.checkpoint()
            await echo.ask(DropKept(), 5)
        assert answers[4] == "echo"


class ThreadDropper(Actor[Say]):
    """Lets another thread hold the last reference to the reply."""

    async def receive(self, message: Say, reply: Reply) -> None:
        holder = [reply]
        del reply
        thread = threading.Thread(target=holder.clear)
        self.tasks.start_soon(self._drop, thread)

    async def _drop(self, thread: threading.Thread) -> None:
        thread.start()


@within(5)
async def test_a_reply_may_become_garbage_on_any_thread() -> None:
    async with ActorSystem() as system:
        dropper = await system.start(ThreadDropper("dropper"))
        with pytest.raises(ActorFailed, match="without an answer"):
            await dropper.ask(Say(1), 3600)


@within(5)
async def test_every_open_ask_fails_when_the_actor_dies_kept_waiting_and_without_room() -> None:
    class Narrow(Echo):
        mailbox_size = 2

    outcomes: dict[int, str] = {}
    async with ActorSystem() as system:
        echo = await system.start(Narrow())

        async def ask(number: int) -> None:
            with pytest.raises(ActorGone) as gone:
                await echo.ask(Keep(number), 3600)
            outcomes[number] = gone.value.reason

        async with anyio.create_task_group() as askers:
            askers.start_soon(ask, 1)
            await anyio.lowlevel.checkpoint()
            await echo.ask(Say(0), 5)  # so 1 is kept by now
            echo.tell_nowait(Fail("boom"))
            for number in (2, 3):  # 2 in the mailbox behind it, 3 waits for room
                askers.start_soon(ask, number)
    # The mailbox had room for Fail and 2; 3 was refused when it closed.
    assert outcomes == dict.fromkeys((1, 2, 3), "it failed: ValueError: boom")
    assert repr(system.failure) == "ValueError('boom')"
    with pytest.raises(ActorGone):
        await echo.tell(Say(1))
    with pytest.raises(ActorGone):
        echo.tell_nowait(Say(1))
    with pytest.raises(ActorGone):
        await echo.ask(Say(1), 5)


def test_a_reply_answers_once_and_a_tell_has_nobody_to_answer() -> None:
    reply = Reply()
    reply.send("to nobody")
    with pytest.raises(RuntimeError, match="answered before"):
        reply.send("again")
    with pytest.raises(RuntimeError, match="answered before"):
        reply.fail(ActorFailed("a", "again"))
