"""Pause, resume and reset, asked of a SchedulerActor with the real core; the executor answers when it is told to."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from actors.messages.admission import ReportBlocks, StoryOf, Tick
from actors.messages.control import (
    ControlMessage,
    PauseMode,
    PauseReport,
    PauseScheduler,
    PrefixCacheReport,
    ResetPrefixCache,
    ResumeScheduler,
)
from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.request import FinishReason
from actors.messages.transfer import BlocksLanded, LoadBlocks
from tests.actors.test_scheduler import TICKET, Loop, a_loop

# The prompt's 40 tokens fill the positions 0 to 39; the token at position p is 1000 + p.
PROMPT = 40
DEPTHS = (1, 2, 3)


def text(max_tokens: int) -> tuple[int, ...]:
    return tuple(1000 + PROMPT + index for index in range(max_tokens))


class Ask:
    """An ask under way in a task of the test."""

    def __init__(self, loop: Loop, message: ControlMessage) -> None:
        self._loop, self._message = loop, message
        self._answer: PauseReport | PrefixCacheReport | None = None
        self._answered = anyio.Event()

    async def run(self) -> None:
        self._answer = await self._loop.address.ask(self._message, 20)
        self._answered.set()

    async def wait(self) -> PauseReport | PrefixCacheReport | None:
        await self._answered.wait()
        return self._answer

    def answer(self) -> PauseReport | PrefixCacheReport | None:
        """None: not yet."""
        return self._answer


class Operator:
    def __init__(self, loop: Loop, tasks: anyio.abc.TaskGroup) -> None:
        self.loop, self._tasks = loop, tasks

    async def asks(self, message: ControlMessage) -> Ask:
        """Returns when the scheduler has taken the message and whatever followed from it at once."""
        ask = Ask(self.loop, message)
        self._tasks.start_soon(ask.run)
        await self.turn()
        return ask

    async def pauses(self, mode: PauseMode) -> Ask:
        return await self.asks(PauseScheduler(mode))

    async def turn(self) -> None:
        """Two questions: the second is answered after all that followed from what lay before the first."""
        await anyio.lowlevel.checkpoint()
        for _ in range(2):
            await self.loop.address.ask(ReportBlocks(), 5)

    async def resumes(self) -> PauseReport:
        report: PauseReport = await self.loop.address.ask(ResumeScheduler(), 5)
        return report

    async def text_of(self, request_id: str) -> tuple[int, ...]:
        return sum((output.token_ids for output in await self.loop.finished(request_id)), ())


@asynccontextmanager
async def operator(depth: int) -> AsyncIterator[tuple[Operator, Loop]]:
    async with a_loop(depth) as (loop, _):
        loop.executor.token_at = lambda position: 1000 + position
        loop.executor.hold = True
        async with anyio.create_task_group() as tasks:
            yield Operator(loop, tasks), loop


@pytest.mark.parametrize("depth", DEPTHS)
async def test_keep_is_reached_when_no_step_is_in_flight_and_then_nothing_is_scheduled(depth: int) -> None:
    async with operator(depth) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(depth)
        pause = await one.pauses("keep")
        assert pause.answer() is None
        await loop.executor.go_on()
        assert await pause.wait() == PauseReport("all", reached=True, aborted=0, running=1, waiting=0)
        # Newcomers queue; deadlines do not stand still; nobody calls the engine unwell.
        await loop.add("late", deadline=time.monotonic() + 0.05)
        assert (await loop.finished("late"))[-1].error == RefusalReason.DEADLINE_EXCEEDED
        assert loop.watchdog.verdict({}, time.monotonic() + 60).healthy
        assert len(loop.executor.plans) == depth
        assert loop.metrics.registry.get_sample_value("kvyard_paused", {"mode": "all"}) == 1
        assert (await one.resumes()) == PauseReport("none", reached=True, aborted=0, running=1, waiting=0)
        assert await one.text_of("a") == text(10)
        assert loop.metrics.registry.get_sample_value("kvyard_paused", {"mode": "all"}) == 0


@pytest.mark.parametrize("depth", DEPTHS)
async def test_wait_is_reached_when_the_last_has_run(depth: int) -> None:
    async with operator(depth) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(depth)
        pause = await one.pauses("wait")
        await loop.add("b", max_tokens=10)
        await one.turn()
        assert pause.answer() is None
        await loop.executor.go_on()
        assert await one.text_of("a") == text(10)
        assert await pause.wait() == PauseReport("new", reached=True, aborted=0, running=0, waiting=1)
        assert all("b" not in plan.request_ids for plan in loop.executor.plans)
        # All blocks are free and somebody waits: rightly so.
        assert loop.watchdog.verdict({}, time.monotonic() + 60).healthy
        await one.resumes()
        assert await one.text_of("b") == text(10)


async def test_wait_is_not_reached_while_one_that_runs_can_just_not_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    async with operator(1) as (one, loop):
        await loop.add("a")
        await loop.executor.until(1)
        pause = await one.pauses("wait")
        with monkeypatch.context() as patched:
            patched.setattr(loop.core, "has_runnable", lambda: False)
            await loop.executor.go_on()
            await one.turn()
            assert pause.answer() is None
        await loop.address.tell(Tick())
        assert await one.text_of("a") == text(3)
        assert await pause.wait() == PauseReport("new", reached=True, aborted=0, running=0, waiting=0)


@pytest.mark.parametrize("depth", DEPTHS)
async def test_abort_ends_the_running_the_parked_and_the_queued(depth: int) -> None:
    async with operator(depth) as (one, loop):
        await loop.add("parked", prompt=32, ticket=TICKET)
        load = (await loop.transfer.wait_for(2))[1]
        await loop.add("running", max_tokens=10)
        await loop.executor.until(depth)
        await loop.add("queued", prompt=100)  # 7 of 8 blocks
        pause = await one.pauses("abort")
        for name in ("running", "parked", "queued"):
            last = (await loop.finished(name))[-1]
            assert (last.finish_reason, last.error) == (FinishReason.ABORT, None)
            assert "the engine was paused" in last.story[-1].detail
        assert pause.answer() is None  # the steps of the one that ran are still in flight
        await loop.executor.go_on()
        assert await pause.wait() == PauseReport("new", reached=True, aborted=3, running=0, waiting=0)
        # What a transfer writes into is kept until it is quiet, as after any abort.
        blocks = await loop.address.ask(ReportBlocks(), 5)
        assert (blocks.free, blocks.held, [grant.request_id for grant in blocks.grants]) == (6, 2, ["parked"])
        await loop.address.tell(BlocksLanded("parked", load.generation))
        assert (await loop.address.ask(ReportBlocks(), 5)).free == 8
        await loop.add("next")
        await one.turn()
        assert all("next" not in plan.request_ids for plan in loop.executor.plans)
        await one.resumes()
        assert await one.text_of("next") == text(3)


async def test_what_has_landed_stays_parked_until_the_pause_is_over() -> None:
    for mode, state in (("wait", "new"), ("keep", "all")):
        async with operator(1) as (one, loop):
            await loop.add("a", prompt=PROMPT, ticket=TICKET)
            load = (await loop.transfer.wait_for(2))[1]
            assert isinstance(load, LoadBlocks)
            pause = await one.pauses("wait" if mode == "wait" else "keep")
            assert pause.answer() == PauseReport("new" if state == "new" else "all", True, 0, 0, 1)
            await loop.address.tell(BlocksLanded("a", load.generation))
            await one.turn()
            assert loop.executor.plans == []
            assert (await loop.address.ask(StoryOf("a"), 5)).intervals[-1].reason == "waiting_for_remote_kvs"
            loop.executor.hold = False
            await one.resumes()
            assert await one.text_of("a") == text(3)


async def test_a_later_message_takes_the_place_of_a_pause_that_is_not_reached() -> None:
    async with operator(2) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(2)
        wait = await one.pauses("wait")
        keep = await one.pauses("keep")
        assert wait.answer() == PauseReport("all", reached=False, aborted=0, running=1, waiting=0)
        assert keep.answer() is None
        abort = await one.pauses("abort")
        assert keep.answer() == PauseReport("new", reached=False, aborted=0, running=0, waiting=0)
        assert abort.answer() is None
        assert await one.resumes() == PauseReport("none", reached=True, aborted=0, running=0, waiting=0)
        assert abort.answer() == PauseReport("none", reached=False, aborted=1, running=0, waiting=0)
        await loop.executor.go_on()
        assert await one.resumes() == PauseReport("none", reached=True, aborted=0, running=0, waiting=0)


@pytest.mark.parametrize("depth", DEPTHS)
async def test_forced_resets_in_the_middle_of_a_text_change_no_token(depth: int) -> None:
    async with operator(depth) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(depth)
        resets = [await one.asks(ResetPrefixCache(preempt_running=True)) for _ in range(2)]
        # No new step meanwhile: the blocks come free with the steps that touch them.
        for in_flight in reversed(range(depth)):
            assert [reset.answer() for reset in resets] == [None, None]
            assert len(loop.executor.plans) == depth
            if in_flight:
                await loop.executor.answer()
                await one.turn()
        await loop.executor.go_on()
        for reset in resets:
            assert await reset.wait() == PrefixCacheReport(done=True, blocks_held=0, grants=())
        assert await one.text_of("a") == text(10)
        assert loop.metrics.registry.get_sample_value("kvyard_preemptions_total") == 1
        assert loop.executor.most_in_flight == depth
        # The whole text so far is computed again: prompt and the tokens of the steps that were in flight.
        again = next(plan for plan in loop.executor.plans[depth:] if plan.new_requests).new_requests[0]
        assert len(again.token_ids) // 4 == PROMPT + depth


async def test_forced_resets_are_bounded_and_keep_no_resume_out() -> None:
    async with operator(1) as (one, loop):
        await loop.add("a")
        await loop.executor.until(1)
        resets = [await one.asks(ResetPrefixCache(preempt_running=True)) for _ in range(64)]
        with pytest.raises(RequestRefused, match="64 resets wait already for the steps in flight") as raised:
            await loop.address.ask(ResetPrefixCache(preempt_running=True), 5)
        assert (raised.value.reason, raised.value.retry_after) == (RefusalReason.QUEUE_FULL, 1)
        assert (await one.resumes()).reached
        assert loop.metrics.stats.steps_in_flight == 1
        await loop.executor.go_on()
        for reset in resets:
            assert await reset.wait() == PrefixCacheReport(done=True, blocks_held=0, grants=())
        assert await one.text_of("a") == text(3)
        assert await loop.address.ask(ResetPrefixCache(preempt_running=True), 5) == PrefixCacheReport(True, 0)


@pytest.mark.parametrize("depth", DEPTHS)
async def test_the_steps_that_a_pause_waits_for_are_counted(depth: int) -> None:
    """Until it is reached, and not while nobody waits: that would be a new report with every step."""
    async with operator(depth) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(depth)
        await one.turn()
        assert loop.metrics.stats.steps_in_flight == 0
        pause = await one.pauses("abort")
        for in_flight in reversed(range(depth)):
            assert (loop.metrics.stats.steps_in_flight, loop.metrics.stats.running) == (in_flight + 1, 0)
            await loop.executor.answer()
            await one.turn()
        await pause.wait()
        assert loop.metrics.stats.steps_in_flight == 0


@pytest.mark.parametrize("depth", DEPTHS)
async def test_a_forced_reset_of_a_paused_engine_leaves_it_paused(depth: int) -> None:
    async with operator(depth) as (one, loop):
        await loop.add("a", max_tokens=10)
        await loop.executor.until(depth)
        pause = await one.pauses("keep")
        reset = await one.asks(ResetPrefixCache(preempt_running=True))
        await loop.executor.go_on()
        assert await reset.wait() == PrefixCacheReport(done=True, blocks_held=0, grants=())
        assert await pause.wait() == PauseReport("all", reached=True, aborted=0, running=0, waiting=1)
        assert len(loop.executor.plans) == depth
        await one.resumes()
        assert await one.text_of("a") == text(10)


async def test_a_reset_forgets_all_or_nothing() -> None:
    async with operator(2) as (one, loop):
        await loop.add("a", max_tokens=4)
        await loop.executor.until(2)
        reset = (await one.asks(ResetPrefixCache())).answer()
        assert isinstance(reset, PrefixCacheReport)
        # 40 tokens and what is planned of the answer: three blocks of 16.
        assert (reset.done, reset.blocks_held) == (False, 3)
        assert [(grant.request_id, grant.state, grant.blocks) for grant in reset.grants] == [("a", "held", 3)]
        await loop.executor.go_on()
        await loop.finished("a")
        await loop.add("b")
        assert max(output.num_cached_tokens for output in await loop.finished("b")) == 32  # two whole blocks
        done = await loop.address.ask(ResetPrefixCache(), 5)
        assert done == PrefixCacheReport(done=True, blocks_held=0, grants=())
        await loop.add("c")
        assert max(output.num_cached_tokens for output in await loop.finished("c")) == 0


async def test_a_forced_reset_cannot_take_the_blocks_of_a_load() -> None:
    async with operator(2) as (one, loop):
        await loop.add("parked", prompt=32, ticket=TICKET)
        load = (await loop.transfer.wait_for(2))[1]
        reset = (await one.asks(ResetPrefixCache(preempt_running=True))).answer()
        assert isinstance(reset, PrefixCacheReport)
        assert (reset.done, [(grant.request_id, grant.blocks) for grant in reset.grants]) == (False, [("parked", 2)])
        loop.executor.hold = False
        await loop.address.tell(BlocksLanded("parked", load.generation))
        assert (await loop.finished("parked"))[-1].finish_reason is FinishReason.LENGTH
