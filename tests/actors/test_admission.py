"""The door, with real mailboxes and a scheduler that only writes down what it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from actors import admission
from actors.admission import AdmissionActor, AdmissionLimits, AdmissionMessage
from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.admission import (
    AbortRequest,
    AddRequest,
    PublishOutputs,
    RequestStory,
    ResponseClosed,
    StoryOf,
    SubmitRequest,
)
from actors.messages.control import (
    PauseReport,
    PauseScheduler,
    PrefixCacheReport,
    ResetPrefixCache,
    ResumeScheduler,
)
from actors.messages.errors import ActorGone, RefusalReason, RequestRefused
from actors.messages.lease import Ticket
from actors.messages.request import EngineRequest, FinishReason, RequestOutput, StoryInterval
from actors.messages.supervision import Drain
from actors.messages.transfer import ReleaseTicket

LIMITS = AdmissionLimits(
    max_model_len=100,
    block_size=4,
    capacity_blocks=20,
    max_waiting_requests=3,
    max_waiting_tokens=50,
    max_unread_tokens=4,
)
TICKET = Ticket("prefill-0", 1, "127.0.0.1", 1, 7, b"c" * 16, 8, b"d" * 16)

PAUSED = PauseReport("new", reached=True, aborted=0, running=0, waiting=3)
DONE = PrefixCacheReport(done=True, blocks_held=0)


class Recorder(Actor[Any]):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.messages: list[Any] = []
        self.changed = anyio.Event()

    async def receive(self, message: Any, reply: Reply) -> None:
        self.messages.append(message)
        self.changed.set()

    async def wait_for(self, count: int) -> list[Any]:
        with anyio.fail_after(5):
            while len(self.messages) < count:
                self.changed = anyio.Event()
                await self.changed.wait()
        return self.messages


class NarrowScheduler(Recorder):
    """Takes one message at a time; answers what an operator asks when it is told to."""

    mailbox_size = 1

    def __init__(self) -> None:
        super().__init__("scheduler")
        self.may_answer = anyio.Event()
        self.may_take = anyio.Event()
        self.may_take.set()

    async def receive(self, message: Any, reply: Reply) -> None:
        await self.may_take.wait()
        await super().receive(message, reply)
        if isinstance(message, PauseScheduler | ResumeScheduler | ResetPrefixCache):
            self.tasks.start_soon(self._answer, message, reply)

    async def _answer(self, message: Any, reply: Reply) -> None:
        await self.may_answer.wait()
        reply.send(DONE if isinstance(message, ResetPrefixCache) else PAUSED)


class Door:
    def __init__(self, system: ActorSystem, scheduler: Recorder) -> None:
        self.system, self.now = system, 10.0
        self.scheduler, self.transfer = scheduler, Recorder("transfer")
        self.actor = AdmissionActor(LIMITS, self.scheduler.address, self.transfer.address, lambda: self.now)
        self.address = self.actor.address

    async def submit(self, request_id: str, prompt: int = 4, max_tokens: int = 4, **fields: Any) -> Any:
        request = EngineRequest(request_id, tuple(range(prompt)), max_tokens=max_tokens, **fields)
        return await self.address.ask(SubmitRequest(request), 5)

    async def refused(self, *arguments: Any, **fields: Any) -> RequestRefused:
        with pytest.raises(RequestRefused) as raised:
            await self.submit(*arguments, **fields)
        return raised.value

    async def publish(self, *outputs: RequestOutput) -> None:
        await self.address.tell(PublishOutputs(outputs))


@asynccontextmanager
async def a_door(scheduler: Recorder | None = None) -> AsyncIterator[Door]:
    async with ActorSystem() as system:
        door = Door(system, scheduler or Recorder("scheduler"))
        for actor in (door.scheduler, door.transfer, door.actor):
            await system.start(actor)
        yield door


async def test_a_request_goes_to_the_scheduler_and_its_outputs_to_its_stream() -> None:
    async with a_door() as door:
        stream = await door.submit("a")
        assert isinstance((await door.scheduler.wait_for(1))[0], AddRequest)
        await door.publish(RequestOutput("a", (1,)), RequestOutput("stranger", (9,)))
        await door.publish(RequestOutput("a", (2,), FinishReason.LENGTH))
        assert sum([output.token_ids async for output in stream], ()) == (1, 2)


async def test_the_scheduler_hears_by_what_id_the_client_knows_the_request() -> None:
    request = EngineRequest("a", (1, 2), max_tokens=1, deadline=100.0)
    async with a_door() as door:
        await door.address.ask(SubmitRequest(request, "mine"), 5)
        assert await door.scheduler.wait_for(1) == [AddRequest(request, 10.0, "mine")]  # the door's clock stands at 10


async def test_both_numbers_are_in_the_refusal_of_a_long_prompt() -> None:
    async with a_door() as door:
        refusal = await door.refused("a", prompt=90, max_tokens=11)
        assert refusal.reason is RefusalReason.CONTEXT_LENGTH_EXCEEDED
        assert "101" in refusal.text
        assert "100" in refusal.text
        assert door.scheduler.messages == []


async def test_what_can_never_fit_the_pool_is_refused_and_what_just_fits_is_not() -> None:
    async with a_door() as door:
        # 20 blocks of 4 hold 80 tokens; the last sampled one needs no place.
        await door.submit("fits", prompt=40, max_tokens=41)
        refusal = await door.refused("a", prompt=40, max_tokens=42)
        assert refusal.reason is RefusalReason.EXCEEDS_KV_CAPACITY
        assert "21 KV blocks" in refusal.text


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (4, 0)])
async def test_what_has_nothing_to_compute_or_to_answer_is_refused(prompt: int, max_tokens: int) -> None:
    async with a_door() as door:
        refusal = await door.refused("a", prompt=prompt, max_tokens=max_tokens)
        assert refusal.reason is RefusalReason.INVALID_REQUEST
        assert f"the prompt has {prompt} tokens and max_tokens is {max_tokens}" in refusal.text
        assert door.scheduler.messages == []


async def test_a_prompt_for_another_engine_must_fit_this_ones_pool() -> None:
    """A prefill engine computes one token more; what decode needs beyond that is checked where max_tokens is known."""
    async with a_door() as door:
        await door.submit("fits", prompt=80, max_tokens=1, do_remote_decode=True)  # 20 blocks of 4
        refusal = await door.refused("a", prompt=81, max_tokens=1, do_remote_decode=True)
        assert refusal.reason is RefusalReason.EXCEEDS_KV_CAPACITY
        refusal = await door.refused("b", prompt=81, max_tokens=1, ticket=TICKET)
        assert refusal.reason is RefusalReason.EXCEEDS_KV_CAPACITY
        assert await door.transfer.wait_for(1) == [ReleaseTicket("b", TICKET)]


async def test_the_queue_is_limited_in_requests_until_first_tokens_come() -> None:
    async with a_door() as door:
        for name in "abc":
            await door.submit(name)
        refusal = await door.refused("d")
        assert refusal.reason is RefusalReason.QUEUE_FULL
        assert refusal.retry_after is not None
        assert refusal.retry_after >= 1
        await door.publish(RequestOutput("a", (1,)))
        await door.submit("d")


async def test_the_queue_is_limited_in_tokens_but_an_empty_one_takes_any_prompt() -> None:
    async with a_door() as door:
        await door.submit("long", prompt=60)
        assert (await door.refused("short", prompt=1)).reason is RefusalReason.QUEUE_FULL


async def test_a_passed_deadline_is_refused_before_prefill_and_its_ticket_released() -> None:
    async with a_door() as door:
        refusal = await door.refused("a", prompt=8, deadline=9.0, ticket=TICKET)
        assert refusal.reason is RefusalReason.DEADLINE_EXCEEDED
        assert await door.transfer.wait_for(1) == [ReleaseTicket("a", TICKET)]
        assert door.scheduler.messages == []


async def test_a_slow_reader_is_aborted_and_told() -> None:
    async with a_door() as door:
        stream = await door.submit("a")
        await door.publish(RequestOutput("a", (1, 2, 3, 4, 5)))
        assert (await door.scheduler.wait_for(2))[1] == AbortRequest("a", "slow reader")
        await door.publish(RequestOutput("a", (), FinishReason.ABORT))
        assert (await anext(stream)).token_ids == (1, 2, 3, 4, 5)
        with pytest.raises(RequestRefused) as raised:
            await anext(stream)
        assert raised.value.reason is RefusalReason.SLOW_READER


async def test_the_end_of_the_engine_ends_every_stream_with_503() -> None:
    async with a_door() as door:
        stream = await door.submit("a")
        await door.system.stop(door.address, 5)
        with pytest.raises(RequestRefused) as raised:
            await anext(stream)
        assert raised.value.reason.http_status == 503


async def test_a_story_has_no_gap_and_ends_with_the_response() -> None:
    async with a_door() as door:
        await door.submit("a", arrival=1.0)
        story = (StoryInterval("queued", 1.0, 2.0), StoryInterval("prefill", 2.0, 9.0))
        await door.publish(RequestOutput("a", (1,), FinishReason.STOP, story=story))
        door.now = 12.0
        await door.address.tell(ResponseClosed("a", "stop"))
        expected = RequestStory("a", True, (*story, StoryInterval("response", 9.0, 12.0, "stop")))
        assert await door.address.ask(StoryOf("a"), 5) == expected
        assert await door.address.ask(StoryOf("nobody"), 5) is None


async def test_a_client_that_left_first_has_a_finished_story_once_the_scheduler_knows() -> None:
    async with a_door() as door:
        await door.submit("a", arrival=1.0)
        await door.address.tell(ResponseClosed("a", "abort"))
        await door.publish(RequestOutput("a", (), FinishReason.ABORT, story=(StoryInterval("queued", 1.0, 10.0),)))
        story = await door.address.ask(StoryOf("a"), 5)
        assert story.finished
        assert [(interval.reason, interval.end) for interval in story.intervals] == [
            ("queued", 10.0),
            ("response", 10.0),
        ]


async def test_a_drain_refuses_newcomers_and_waits_for_the_others() -> None:
    async with a_door() as door:
        await door.submit("a")
        async with anyio.create_task_group() as tasks:
            drained = anyio.Event()

            async def drain() -> None:
                await door.address.ask(Drain(5), 5)
                drained.set()

            tasks.start_soon(drain)
            while not door.actor.draining:
                await anyio.lowlevel.checkpoint()
            assert (await door.refused("b")).reason is RefusalReason.ENGINE_UNAVAILABLE
            assert not drained.is_set()
            await door.publish(RequestOutput("a", (1,), FinishReason.STOP))


async def test_an_order_does_not_overtake_the_requests_before_it() -> None:
    scheduler = NarrowScheduler()
    scheduler.may_answer.set()
    async with a_door(scheduler) as door:
        for name in "abc":
            await door.address.tell(SubmitRequest(EngineRequest(name, (1,), max_tokens=1)))
        assert await door.address.ask(PauseScheduler("abort"), 5) == PAUSED
        assert [type(message) for message in scheduler.messages] == [AddRequest] * 3 + [PauseScheduler]
        assert await door.address.ask(ResetPrefixCache(preempt_running=True), 5) == DONE
        assert scheduler.messages[-1] == ResetPrefixCache(preempt_running=True)


async def test_a_request_after_an_order_does_not_overtake_it() -> None:
    """Else `abort` would end a newcomer. The scheduler takes nothing at first, so that all of them wait at the door."""
    scheduler = NarrowScheduler()
    scheduler.may_take = anyio.Event()
    async with a_door(scheduler) as door, anyio.create_task_group() as tasks:
        messages: tuple[AdmissionMessage, ...] = (
            *(SubmitRequest(EngineRequest(name, (1,), max_tokens=1)) for name in "ab"),
            PauseScheduler("abort"),
            SubmitRequest(EngineRequest("c", (1,), max_tokens=1)),
            ResumeScheduler(),
        )
        for message in messages:
            tasks.start_soon(door.address.ask, message, 5)
            await anyio.lowlevel.checkpoint()
        scheduler.may_take.set()
        scheduler.may_answer.set()
    told = [
        message.request.request_id if isinstance(message, AddRequest) else message for message in scheduler.messages
    ]
    assert told == ["a", "b", PauseScheduler("abort"), "c", ResumeScheduler()]


async def test_orders_that_the_scheduler_does_not_take_are_bounded() -> None:
    """64, beside the one in its mailbox and the one in its hands. Once it takes them there is room again."""
    scheduler = NarrowScheduler()
    scheduler.may_take = anyio.Event()
    async with a_door(scheduler) as door, anyio.create_task_group() as tasks:
        for _ in range(66):
            tasks.start_soon(door.address.ask, ResetPrefixCache(preempt_running=True), 5)
            await anyio.lowlevel.checkpoint()
        with pytest.raises(RequestRefused, match="64 orders wait already") as raised:
            await door.address.ask(ResumeScheduler(), 5)
        assert (raised.value.reason, raised.value.retry_after) == (RefusalReason.QUEUE_FULL, 1)
        scheduler.may_take.set()
        await scheduler.wait_for(66)
        scheduler.may_answer.set()
        assert await door.address.ask(ResumeScheduler(), 5) == PAUSED


async def test_a_pause_may_take_longer_than_any_other_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ASK_SECONDS", 0.0)
    scheduler = NarrowScheduler()
    async with a_door(scheduler) as door, anyio.create_task_group() as tasks:
        reports: list[PauseReport] = []

        async def pause() -> None:
            reports.append(await door.address.ask(PauseScheduler("wait"), 5))

        tasks.start_soon(pause)
        await scheduler.wait_for(1)
        await door.submit("a")  # requests still come in, and queue
        assert reports == []
        scheduler.may_answer.set()
    assert reports == [PAUSED]


async def test_an_order_learns_that_the_scheduler_is_gone() -> None:
    async with a_door() as door:
        await door.system.stop(door.scheduler.address, 5)
        with pytest.raises(ActorGone):
            await door.address.ask(ResumeScheduler(), 5)


async def test_newcomers_of_a_pause_queue_up_to_the_limits_and_its_length_is_no_measure_of_the_queue() -> None:
    scheduler = NarrowScheduler()
    scheduler.may_answer.set()
    async with a_door(scheduler) as door:
        await door.submit("first")
        await door.publish(RequestOutput("first", (1,)))
        await door.address.ask(PauseScheduler("keep"), 5)
        for name in "abc":
            await door.submit(name)
        assert (await door.refused("d")).reason is RefusalReason.QUEUE_FULL
        door.now += 1000
        await door.address.ask(ResumeScheduler(), 5)
        await door.publish(RequestOutput("a", (1,)))
        await door.submit("d")
        refusal = await door.refused("e")
        # The 1,000 s between two first tokens would have made it the 60 s that are the most.
        assert (refusal.reason, refusal.retry_after) == (RefusalReason.QUEUE_FULL, 1)
