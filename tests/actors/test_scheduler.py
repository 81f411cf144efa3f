"""The step loop: the real core between real mailboxes, an executor that samples token 7, a transfer that notes."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from actors.configuration import SchedulerConfiguration
from actors.health import Watchdog
from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.admission import AbortRequest, AddRequest, PublishOutputs, ReportBlocks, StoryOf
from actors.messages.errors import ActorFailed, RefusalReason
from actors.messages.lease import Ticket
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.transfer import BlocksLanded, HoldTicket, LoadBlocks, ReleaseTicket, TransferFailed
from actors.scheduler import SchedulerActor
from actors.scheduling.core import SchedulerCore
from api.metrics import EngineMetrics
from tests.actors.test_admission import Recorder

TICKET = Ticket("prefill-0", 1, "127.0.0.1", 1, 7, b"c" * 16, 32, b"d" * 16)
CONFIGURATION = SchedulerConfiguration(
    usable_blocks=8,
    block_size=16,
    max_num_batched_tokens=64,
    max_model_len=128,
    prefix_caching=True,
    kv_connector=True,
    kv_load_failure_policy="recompute",
    fence_frees=True,
)


class Sampler(Actor[StepPlan]):
    """Answers a plan at once, or while it is told to hold when `go_on` is called: with token 7, or with `token_at` of
    the position to be filled."""

    def __init__(self) -> None:
        super().__init__("executor")
        self.plans: list[StepPlan] = []
        self.results: Any = None
        self.fail = self.hold = False
        self.token_at: Callable[[int], int] = lambda position: 7
        self.unanswered: list[StepPlan] = []
        self.most_in_flight = 0
        self._planned = anyio.Event()

    async def receive(self, message: StepPlan, reply: Reply) -> None:
        self.plans.append(message)
        self.unanswered.append(message)
        self.most_in_flight = max(self.most_in_flight, len(self.unanswered))
        self._planned.set()
        if not self.hold:
            self.tasks.start_soon(self.answer)

    async def until(self, plans: int) -> None:
        while len(self.plans) < plans:
            self._planned = anyio.Event()
            await self._planned.wait()

    async def go_on(self) -> None:
        """Answers what is held, and whatever comes, at once."""
        self.hold = False
        while self.unanswered:
            await self.answer()

    async def answer(self) -> None:
        """The oldest that is held."""
        plan = self.unanswered.pop(0)
        if self.fail:
            await self.results.tell(StepFailed(plan.step, "out of memory"))
            return
        starts, counts = array("i", plan.num_computed_tokens), array("i", plan.num_scheduled_tokens)
        tokens = array("i")
        for row, num_sampled in enumerate(array("i", plan.num_sampled)):
            tokens.extend([self.token_at(starts[row] + counts[row])] * num_sampled)
        await self.results.tell(StepResult(plan.step, plan.num_sampled, tokens.tobytes()))


class Loop:
    def __init__(self, depth: int = 1) -> None:
        self.metrics, self.watchdog = EngineMetrics("test"), Watchdog(100)
        self.core = SchedulerCore(msgspec.structs.replace(CONFIGURATION, async_scheduling=depth > 1))
        self.actor = SchedulerActor(
            self.core,
            clock=time.monotonic,
            observer=self.metrics,
            watchdog=self.watchdog,
            recompute_failed_loads=True,
            depth=depth,
        )
        self.address = self.actor.address
        self.executor, self.admission, self.transfer = Sampler(), Recorder("admission"), Recorder("transfer")
        self.executor.results = self.address
        self.actor.connect(self.admission.address, self.executor.address, self.transfer.address)

    async def add(self, request_id: str, prompt: int = 40, max_tokens: int = 3, **fields: Any) -> None:
        now = time.monotonic()
        fields = {"arrival": now, **fields}
        request = EngineRequest(request_id, tuple(range(prompt)), max_tokens=max_tokens, **fields)
        await self.address.tell(AddRequest(request))

    async def finished(self, request_id: str) -> list[RequestOutput]:
        """All outputs of a request, once it has ended."""
        count = 0
        while True:
            published: list[PublishOutputs] = self.admission.messages
            outputs = [each for message in published for each in message.outputs if each.request_id == request_id]
            if outputs and outputs[-1].finish_reason is not None:
                return outputs
            count = len(published) + 1
            await self.admission.wait_for(count)


@asynccontextmanager
async def a_loop(depth: int = 1) -> AsyncIterator[tuple[Loop, ActorSystem]]:
    async with ActorSystem() as system:
        loop = Loop(depth)
        for actor in (loop.executor, loop.admission, loop.transfer, loop.actor):
            await system.start(actor)
        with anyio.fail_after(20):
            yield loop, system


async def test_requests_run_to_their_end_one_step_at_a_time() -> None:
    async with a_loop() as (loop, _):
        for name in "abc":
            await loop.add(name)
        for name in "abc":
            outputs = await loop.finished(name)
            assert sum((output.token_ids for output in outputs), ()) == (7, 7, 7)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert loop.executor.most_in_flight == 1
        report = await loop.address.ask(ReportBlocks(), 5)
        assert (report.free, report.grants) == (8, ())


async def test_a_prompt_longer_than_the_budget_of_a_step_is_computed_in_pieces() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a", prompt=100, max_tokens=1)
        assert (await loop.finished("a"))[-1].finish_reason is FinishReason.LENGTH
        # max_num_batched_tokens is 64.
        assert [array("i", plan.num_scheduled_tokens).tolist() for plan in loop.executor.plans] == [[64], [36]]


async def test_a_parked_request_runs_when_its_blocks_have_landed_and_not_before() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a", prompt=32, ticket=TICKET)
        hold, load = await loop.transfer.wait_for(2)
        assert isinstance(hold, HoldTicket)
        assert isinstance(load, LoadBlocks)
        assert array("i", load.block_ids).tolist() == [1, 2]  # 32 tokens in blocks of 16; block 0 is the null block
        assert (await loop.address.ask(StoryOf("a"), 5)).intervals[-1].reason == "waiting_for_remote_kvs"
        assert loop.executor.plans == []
        await loop.address.tell(BlocksLanded("a", load.generation))
        await loop.finished("a")
        assert array("i", loop.executor.plans[0].num_computed_tokens).tolist() == [31]  # only the last token is left


async def test_a_failed_load_wakes_an_idle_engine_which_computes_the_prompt() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a", prompt=32, ticket=TICKET)
        load = (await loop.transfer.wait_for(2))[1]
        await loop.address.tell(TransferFailed("a", load.generation, "checksum"))
        assert (await loop.finished("a"))[-1].finish_reason is FinishReason.LENGTH
        assert array("i", loop.executor.plans[0].num_scheduled_tokens).tolist() == [32]
        assert loop.metrics.registry.get_sample_value("kvyard_kv_loads_total", {"outcome": "recomputed"}) == 1


async def test_a_deadline_ends_a_parked_request_although_nothing_happens() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a", prompt=32, ticket=TICKET, deadline=time.monotonic() + 0.1)
        (output,) = await loop.finished("a")
        assert output.error == RefusalReason.DEADLINE_EXCEEDED
        assert "waiting_for_remote_kvs" in str(output.error_text)
        # Its blocks stay until the transfer is quiet.
        assert (await loop.address.ask(ReportBlocks(), 5)).held == 2
        load = loop.transfer.messages[1]
        await loop.address.tell(BlocksLanded("a", load.generation))
        assert (await loop.address.ask(ReportBlocks(), 5)).free == 8


async def test_an_abort_before_the_load_releases_the_ticket() -> None:
    async with a_loop() as (loop, _):
        # 8 blocks: the first request takes all, so the second cannot load yet.
        await loop.add("big", prompt=112, max_tokens=10)
        await loop.add("a", prompt=32, ticket=TICKET)
        await loop.address.tell(AbortRequest("a", "client gone"))
        await loop.finished("a")
        await loop.finished("big")
        assert [type(message) for message in loop.transfer.messages] == [HoldTicket, ReleaseTicket]


async def test_a_failed_step_ends_the_scheduler_and_so_the_engine() -> None:
    async with a_loop() as (loop, system):
        loop.executor.fail = True
        await loop.add("a")
        await system.wait_failed()
        assert isinstance(system.failure, ActorFailed)
        assert "out of memory" in str(system.failure)


async def test_a_core_that_stands_still_with_work_makes_the_engine_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_loop() as (loop, _):
        monkeypatch.setattr(loop.core, "has_runnable", lambda: False)
        await loop.add("a")
        await loop.address.ask(ReportBlocks(), 5)
        verdict = loop.watchdog.verdict({}, time.monotonic() + 6)
        assert verdict.reason.startswith("runnable requests have seen no plan for 6.")
        await loop.address.tell(AbortRequest("a", "given up"))
        await loop.address.ask(ReportBlocks(), 5)
        await loop.finished("a")
        assert loop.watchdog.verdict({}, time.monotonic() + 60).healthy


async def test_parked_requests_do_not_make_an_engine_unhealthy() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a", prompt=32, ticket=TICKET)
        await loop.transfer.wait_for(2)
        assert loop.watchdog.verdict({}, time.monotonic() + 60).healthy


async def test_a_result_that_comes_twice_is_counted_and_ignored() -> None:
    async with a_loop() as (loop, _):
        await loop.add("a")
        await loop.finished("a")
        plan = loop.executor.plans[-1]
        await loop.address.tell(StepResult(plan.step, plan.num_sampled, array("i", [7]).tobytes()))
        await loop.add("b")
        assert (await loop.finished("b"))[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("late", [BlocksLanded("ghost", 1), TransferFailed("ghost", 9, "deadline")])
async def test_reports_for_strangers_are_counted_and_ignored(late: BlocksLanded | TransferFailed) -> None:
    async with a_loop() as (loop, _):
        await loop.address.tell(late)
        await loop.add("a")
        await loop.finished("a")
        assert loop.metrics.registry.get_sample_value("kvyard_late_events_total") == 1
