"""What the SchedulerActor adds to the log of its core: notes of what the core cannot see, a flush per turn, the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from actors.kernel.system import ActorSystem
from actors.messages.admission import AbortRequest, AddRequest
from actors.messages.request import EngineRequest
from actors.scheduler import SchedulerActor
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Aborted, Added, Planned, Record, RequestNote, StepApplied, StepNote
from tests.actors.test_scheduler import CONFIGURATION, Loop
from tests.scheduling.recorded_runs import replayed


class Sink:
    """The records of each flush."""

    def __init__(self) -> None:
        self.flushed: list[list[Record]] = []
        self.pending: list[Record] = []
        self.closed = 0

    def write(self, record: Record) -> None:
        assert not self.closed
        self.pending.append(record)

    def flush(self) -> None:
        self.flushed.append(self.pending)
        self.pending = []

    def close(self) -> None:
        self.flush()
        self.closed += 1

    @property
    def records(self) -> list[Record]:
        return [record for flush in self.flushed for record in flush]


class LoggedLoop(Loop):
    def __init__(self, sink: Sink, depth: int) -> None:
        super().__init__(depth)
        self.core = RecordedCore(msgspec.structs.replace(CONFIGURATION, async_scheduling=depth > 1), sink.write)
        self.actor = SchedulerActor(
            self.core,
            clock=time.monotonic,
            observer=self.metrics,
            watchdog=self.watchdog,
            recompute_failed_loads=True,
            depth=depth,
            step_log=sink,
        )
        self.address = self.executor.results = self.actor.address
        self.actor.connect(self.admission.address, self.executor.address, self.transfer.address)


@asynccontextmanager
async def a_logged_loop(depth: int = 1) -> AsyncIterator[tuple[LoggedLoop, Sink, ActorSystem]]:
    sink = Sink()
    async with ActorSystem() as system:
        loop = LoggedLoop(sink, depth)
        for actor in (loop.executor, loop.admission, loop.transfer, loop.actor):
            await system.start(actor)
        with anyio.fail_after(20):
            yield loop, sink, system


async def test_each_request_and_each_step_has_its_note() -> None:
    async with a_logged_loop(depth=2) as (loop, sink, system):
        before = time.monotonic()
        for name in "abc":
            request = EngineRequest(name, tuple(range(30)), max_tokens=4, arrival=time.monotonic())
            await loop.address.tell(AddRequest(request, time.monotonic(), f"trace-{name}"))
        for name in "abc":
            await loop.finished(name)
        await system.stop(loop.address, 5.0)
    records, num_steps = sink.records, len(loop.executor.plans)
    assert sink.closed == 1
    notes = {record.request_id: place for place, record in enumerate(records) if isinstance(record, RequestNote)}
    assert list(notes) == ["a", "b", "c"]
    for name, place in notes.items():
        note, added = records[place], records[place + 1]
        assert isinstance(note, RequestNote)
        assert note.trace_id == f"trace-{name}"
        assert isinstance(added, Added)
        assert added.request.request_id == name
        assert before < added.request.arrival < note.submitted < added.now
    steps = [record for record in records if isinstance(record, StepNote)]
    assert [note.step for note in steps] == list(range(1, num_steps + 1))
    planned = {record.plan.step: record.now for record in records if isinstance(record, Planned)}
    applied = {
        record.result.step: record.now for record in records if isinstance(record, StepApplied) and record.result
    }
    for note in steps:
        assert planned[note.step] < note.dispatched < applied[note.step] == note.returned < note.published
        assert 0 < note.schedule_s < note.returned - planned[note.step]
    assert replayed(loop.core.config, records).num_steps == num_steps


def test_the_note_of_an_older_log_has_no_trace_id() -> None:
    """Two fields, as it was written before there was a third."""
    older = msgspec.msgpack.encode(["request", "a", 1.5])
    assert msgspec.msgpack.decode(older, type=Record) == RequestNote("a", 1.5, "")


async def test_a_turn_is_flushed_once_with_all_that_it_did() -> None:
    async with a_logged_loop() as (loop, sink, _):
        loop.executor.hold = True
        await loop.add("a", max_tokens=2)
        await loop.executor.until(1)
        await loop.add("b")
        await loop.address.tell(AbortRequest("b", "the client left"))
        await loop.executor.go_on()
        await loop.finished("a")
    kinds = [[type(record) for record in flush] for flush in sink.flushed]
    assert kinds[0] == [RequestNote, Added, Planned]
    assert [kind for flush in kinds[1:3] for kind in flush][:3] == [RequestNote, Added, Aborted]
    of_the_result = next(flush for flush in kinds if StepApplied in flush)
    assert of_the_result.index(StepApplied) < of_the_result.index(Planned) < of_the_result.index(StepNote)


async def test_the_log_of_an_engine_that_fails_is_whole() -> None:
    async with a_logged_loop() as (loop, sink, system):
        loop.executor.fail = True
        await loop.add("a")
        await system.wait_failed()
    assert sink.closed == 1
    assert [type(record) for record in sink.records] == [RequestNote, Added, Planned]
