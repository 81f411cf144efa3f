"""The waiting pass stopped at its head for ever: nothing runs, nothing is under way that could free a block.

Either a request that waits behind the head holds what the head needs: holders go on, in order, and if none can, the
last one gives its blocks back. Or nobody holds anything, and the head can never run: it ends with an error that names
what it lacks. The AdmissionActor refuses such a request when it arrives; whatever reaches the core must not hang it.
"""

from __future__ import annotations

from actors.messages.errors import RefusalReason
from actors.messages.request import FinishReason
from actors.scheduling.candidate import Verdict, promote, try_to_admit
from actors.scheduling.holders import holders, nothing_comes_back
from actors.scheduling.request import SchedulerRequest, Status
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import ScheduledStep


def break_impasse(
    state: SchedulerState,
    step: ScheduledStep,
    adapters: set[str | None],
    head: SchedulerRequest,
    verdict: Verdict,
    now: float,
) -> bool:
    """`head` is where the pass stopped. True: something changed, the pass is worth another try."""
    if state.in_flight or not nothing_comes_back(state):
        return False
    waiting_holders = holders(state)
    if not state.is_at_a_standstill and any(request is not head for request in waiting_holders):
        return False
    for request in waiting_holders:
        promote(state, request, now)
        if request.grant is None:
            return True  # a failed load had left it nothing: what it held is free, and the head is first
        if try_to_admit(state, step, request, adapters, now)[0] is Verdict.ADMITTED:
            state.take_from_queue(request)
            state.running.append(request)
            return True
    if state.transfers.loads:
        return False
    if any(request is not head for request in waiting_holders):
        _revoke(state, waiting_holders[-1], now)
        return True
    if state.transfers.quarantined or any(_awaits_a_word(state, request) for request in state.skipped_waiting):
        return False
    reason = RefusalReason.EXCEEDS_KV_CAPACITY if verdict is Verdict.NO_ROOM else RefusalReason.INVALID_REQUEST
    text = f"it can never be scheduled: with nothing else in the engine it {head.story.detail}"
    state.end(head, FinishReason.ERROR, now, reason, text)
    return True


def _awaits_a_word(state: SchedulerState, request: SchedulerRequest) -> bool:
    """Its grammar's, or its connector's, which may come at any time and promote it."""
    if request.status is Status.WAITING_FOR_GRAMMAR:
        return not request.grammar_ready
    connector = state.connector
    return connector is not None and request.num_computed_tokens == 0 and connector.matched(request, 0) is None


def _revoke(state: SchedulerState, request: SchedulerRequest, now: float) -> None:
    """It computes what it had loaded again, later. What is registered stays findable."""
    assert request.grant is not None
    promote(state, request, now)
    if request.grant is not None:
        state.give_back(request, request.grant, now)
    request.forget_blocks()
    state.unfinished_prefills.pop(request.request_id, None)
    request.story.turn("preempted", now, "gave back what it had loaded, so that others can run")
