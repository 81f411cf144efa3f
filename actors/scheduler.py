"""SchedulerActor: the step loop around the pure scheduler core.

In every turn: apply what has happened (all messages in the mailbox) → expire deadlines → plan while a place in flight
is free (promotion of parked requests is part of planning) → hand the core's effects to whom they concern. Every event
wakes it through its mailbox, deadlines through an alarm; it never polls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import anyio
import msgspec

from actors.health import Watchdog
from actors.idleness import Idleness
from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.messages.admission import (
    AbortRequest,
    AddRequest,
    PublishOutputs,
    ReportBlocks,
    StoryOf,
    Tick,
)
from actors.messages.control import ControlMessage, PauseScheduler, ResetPrefixCache, ResumeScheduler
from actors.messages.errors import ActorFailed
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.messages.request import RequestOutput
from actors.messages.stats import EngineStats
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    LeaseDenied,
    LeaseExpired,
    LeaseGranted,
    PeerLost,
    TransferFailed,
    TransferOrder,
    TransferReport,
)
from actors.observer import Observer
from actors.pausing import Pausing
from actors.scheduling.core import SchedulerCore
from actors.scheduling.records import RequestNote, StepNote
from actors.step_log.writer import NO_STEP_LOG, RecordSink
from actors.worker_settings import SCHEDULER_WINDOW

SchedulerMessage = (
    AddRequest
    | AbortRequest
    | StoryOf
    | ReportBlocks
    | ControlMessage
    | StepResult
    | StepFailed
    | TransferReport
    | Tick
)


class Dispatched(NamedTuple):
    """A step that its result has not come back of. Times of the engine's clock, seconds."""

    plan: StepPlan
    planned: float  # schedule() was called
    sent: float  # it had answered

    def note(self, returned: float, published: float) -> StepNote:
        return StepNote(self.plan.step, self.sent - self.planned, self.sent, returned, published)


class SchedulerActor(Actor[SchedulerMessage]):
    mailbox_size = SCHEDULER_WINDOW

    def __init__(
        self,
        core: SchedulerCore,
        *,
        clock: Callable[[], float],
        observer: Observer,
        watchdog: Watchdog,
        recompute_failed_loads: bool,
        depth: int = 1,
        step_log: RecordSink = NO_STEP_LOG,
    ) -> None:
        """`depth`: most steps in flight. `step_log`: where a recorded core writes; it gets notes of what the core
        cannot see. The others' addresses come with `connect`, since they need this one's.
        """
        super().__init__("scheduler")
        self._core, self._clock, self._observer, self._watchdog = core, clock, observer, watchdog
        self._failed_load = "recomputed" if recompute_failed_loads else "failed"
        self._depth = depth
        self._idleness = Idleness()
        self._pausing = Pausing(core)
        self._step_log = step_log
        self._in_flight: dict[int, Dispatched] = {}
        self._returned: list[tuple[Dispatched, float]] = []  # with the time; their outputs are not handed on yet
        self._alarm = anyio.CancelScope()
        self._stats = EngineStats()

    def connect(
        self, admission: Address[PublishOutputs], executor: Address[StepPlan], transfer: Address[TransferOrder]
    ) -> None:
        self._admission, self._executor, self._transfer = admission, executor, transfer

    async def started(self) -> None:
        self.tasks.start_soon(self._ring)

    async def stopped(self) -> None:
        self._step_log.close()

    async def receive(self, message: SchedulerMessage, reply: Reply) -> None:
        now = self._clock()
        match message:
            case StepResult():
                self._complete(message, now)
            case AddRequest():
                self._step_log.write(RequestNote(message.request.request_id, message.submitted, message.trace_id))
                self._core.add(message.request, now)
            case AbortRequest():
                self._core.abort(message.request_id, now, message.reason)
            case StoryOf():
                reply.send(self._core.story(message.request_id))
            case ReportBlocks():
                reply.send(self._core.blocks_report(now))
            case PauseScheduler() | ResumeScheduler() | ResetPrefixCache():
                self._pausing.receive(message, reply, now)
            case StepFailed():
                raise ActorFailed("executor", f"step {message.step}: {message.error}")
            case Tick():
                pass
            case _:
                self._core.apply(message, now)
                self._observe(message)

    async def settled(self) -> None:
        now = self._clock()
        self._core.expire(now)
        self._pausing.before_planning(now, len(self._in_flight))
        while self._may_plan():
            planned = self._clock()
            plan = self._core.schedule(now)
            if not plan.request_ids:
                continue  # it may have preempted only: then it can plan again, else nothing is runnable any more
            self._in_flight[plan.step] = Dispatched(plan, planned, self._clock())
            self._watchdog.step_dispatched(plan.step, plan.num_tokens, now)
            self._idleness.step_dispatched(plan.step, now)
            await self._executor.tell(plan)
        await self._deliver()
        self._pausing.after_delivery(len(self._in_flight))
        deadline = self._core.next_deadline()
        self._alarm.deadline = math.inf if deadline is None else deadline
        self._publish_stats(now)
        self._step_log.flush()

    def _may_plan(self) -> bool:
        has_place = len(self._in_flight) < self._depth
        return has_place and not self._pausing.holds_plans and self._core.has_runnable()

    def _complete(self, result: StepResult, now: float) -> None:
        self._core.apply(result, now)
        if result.step not in self._in_flight:
            return  # the core has counted it as late
        step = self._in_flight.pop(result.step)
        self._returned.append((step, now))
        self._watchdog.step_completed(result.step, now)
        self._observer.step_completed(step.plan.num_tokens, len(step.plan.request_ids), now - step.planned)
        busy = result.execute_s + result.sample_s
        in_vain = self._idleness.step_completed(result.step, result.waited_s, busy, now)
        self._observer.executor_worked(busy, result.waited_s, in_vain)

    async def _deliver(self) -> None:
        outputs: list[RequestOutput] = []
        for effect in self._core.take_effects():
            if isinstance(effect, RequestOutput):
                outputs.append(effect)
            else:
                await self._transfer.tell(effect)
        if outputs:
            await self._admission.tell(PublishOutputs(tuple(outputs)))
        published = self._clock()
        for step, returned in self._returned:
            self._step_log.write(step.note(returned, published))
        self._returned.clear()

    def _observe(self, report: TransferReport) -> None:
        match report:
            case BlocksLanded():
                self._observer.load_ended("landed", report.seconds, report.num_bytes)
            case TransferFailed():
                if report.reason != "cancelled":
                    self._observer.load_ended(self._failed_load, 0.0, 0)
                if report.reason == "incompatible":
                    self._observer.load_refused_by_layout(report.peer_engine_id, report.detail)
            case LeaseExpired():
                self._observer.lease_expired()
            case PeerLost():
                self._observer.peer_lost(report.engine_id)
            case BlocksSent() | BlocksQuiet() | LeaseGranted() | LeaseDenied():
                pass

    def _publish_stats(self, now: float) -> None:
        stats = self._core.stats()
        if self._pausing.waits:
            stats = msgspec.structs.replace(stats, steps_in_flight=len(self._in_flight))
        # Whoever waits while others hold blocks waits rightly; with all blocks free somebody should have been admitted.
        nobody_holds = not (stats.blocks_held + stats.blocks_fenced + stats.blocks_leased + stats.blocks_quarantined)
        should_admit = stats.paused == "none" and stats.waiting > 0 and nobody_holds
        should_run = stats.paused != "all" and (stats.running > 0 or should_admit)
        self._watchdog.runnable(should_run and not self._in_flight, now)
        self._idleness.runnable(should_run, now)
        if stats != self._stats:
            self._stats = stats
            self._watchdog.quarantined(stats.blocks_quarantined)
            self._observer.stats_changed(stats)

    async def _ring(self) -> None:
        """Sleeps until the alarm's deadline, which `settled` moves; then a Tick wakes the actor."""
        while True:
            with anyio.CancelScope(deadline=self._alarm.deadline) as self._alarm:
                await anyio.sleep_forever()
            await self.address.tell(Tick())
            self._alarm = anyio.CancelScope()
