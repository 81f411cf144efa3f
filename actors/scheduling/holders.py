"""Requests that wait with blocks in hand: who they are, and whether anything but them could free a block."""

from __future__ import annotations

from actors.scheduling.grants import GrantState
from actors.scheduling.request import LoadPhase, SchedulerRequest
from actors.scheduling.state import SchedulerState


def holders(state: SchedulerState) -> list[SchedulerRequest]:
    """Requests that wait with blocks in hand and could run, in order of service."""
    return [
        request
        for request in state.queued()
        if request.grant is not None and request.load_phase is not LoadPhase.IN_FLIGHT
    ]


def nothing_comes_back(state: SchedulerState) -> bool:
    """No block that is held now will be free unless one of the waiting requests goes on. Quarantine may last."""
    if state.running or any(
        grant.state in (GrantState.FENCED, GrantState.LEASED) for grant in state.kv.ledger.live.values()
    ):
        return False
    loads = state.transfers.loads.values()
    return not any(not load.is_wanted or state.config.kv_load_failure_policy == "fail" for load in loads)


def would_starve(state: SchedulerState, request: SchedulerRequest, hits: list[int]) -> bool:
    """Admitted chunk by chunk it would run out of blocks, lose them and come back as the head, for ever."""
    if not nothing_comes_back(state) or all(holder is request for holder in holders(state)):
        return False
    return not state.kv.fits(request, len(request.tokens) + state.kv.num_lookahead, hits, spare=0, reserved=0)
