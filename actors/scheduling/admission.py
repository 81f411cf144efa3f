"""The waiting pass of a step: who comes into `running`, who starts to load, who has to wait and why.

    skip: cannot go now through no fault of memory (load in flight, adapter cap, ...): those behind it are still tried
    stop: does not fit: nobody overtakes it on memory

Comes after the running pass and only in a step that preempted nobody. Where a stop would be for ever, `impasse` helps.
"""

from __future__ import annotations

from actors.scheduling.candidate import Verdict, try_to_admit
from actors.scheduling.impasse import break_impasse
from actors.scheduling.queues import RequestQueue
from actors.scheduling.request import SchedulerRequest, Status
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import ScheduledStep


def schedule_waiting(state: SchedulerState, step: ScheduledStep, now: float) -> None:
    adapters = _adapters_of(state, step)
    while True:
        verdict, head = _admission_pass(state, step, adapters, now)
        if head is None or not break_impasse(state, step, adapters, head, verdict, now):
            return


def readmit_preempted(state: SchedulerState, step: ScheduledStep, now: float) -> None:
    """The waiting pass of a pause that lets what runs go on: for those alone who ran and were preempted."""
    adapters = _adapters_of(state, step)
    for request in state.queued():
        if request.status is not Status.PREEMPTED:
            continue
        if step.budget <= 0 or len(state.running) >= state.config.max_num_seqs:
            return
        verdict, request.story.detail = try_to_admit(state, step, request, adapters, now)
        if verdict is Verdict.ADMITTED:
            state.take_from_queue(request)
            state.running.append(request)
        elif verdict in (Verdict.STOP, Verdict.NO_ROOM):
            return


def _adapters_of(state: SchedulerState, step: ScheduledStep) -> set[str | None]:
    return {request.engine_request.lora for request in step.requests} - {None} if state.config.max_loras else set()


def _admission_pass(
    state: SchedulerState, step: ScheduledStep, adapters: set[str | None], now: float
) -> tuple[Verdict, SchedulerRequest | None]:
    """The last verdict, and the request at which the pass stopped, if it did."""
    skipped: list[SchedulerRequest] = []
    verdict, head = Verdict.SKIP, None
    while len(state.waiting) or len(state.skipped_waiting):
        queue = _next_queue(state)
        request = queue.peek()
        if step.budget <= 0:
            verdict, detail = Verdict.STOP, "token budget spent"
        elif len(state.running) >= state.config.max_num_seqs:
            verdict, detail = Verdict.STOP, f"max_num_seqs {state.config.max_num_seqs} reached"
        else:
            verdict, detail = try_to_admit(state, step, request, adapters, now)
        if verdict in (Verdict.STOP, Verdict.NO_ROOM):
            request.story.detail = detail
            state.stopped = (now, detail)
            head = request
            break
        queue.pop()
        if verdict is Verdict.ADMITTED:
            state.running.append(request)
        else:
            request.story.detail = detail
            skipped.append(request)
    state.skipped_waiting.push_front_all(skipped)
    return verdict, head


def _next_queue(state: SchedulerState) -> RequestQueue:
    waiting, skipped = state.waiting, state.skipped_waiting
    if not len(skipped):
        return waiting
    if state.config.policy == "priority" and len(waiting) and waiting.peek().order < skipped.peek().order:
        return waiting
    return skipped
