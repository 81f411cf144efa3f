"""Why a request that is live was not scheduled in the step that was just planned. It reads, and changes nothing."""

from __future__ import annotations

from actors.scheduling.request import LoadPhase, SchedulerRequest, Status
from actors.scheduling.state import Pause, SchedulerState
from actors.scheduling.step import ScheduledStep


class Reasons:
    """For one step. `why` is for requests that have no row in it."""

    def __init__(self, state: SchedulerState, step: ScheduledStep) -> None:
        self._state, self._step = state, step
        self._preempted = frozenset(step.preempted)
        self._head = self._find_head()

    def why(self, request: SchedulerRequest, queue: str) -> str:
        match request.status:
            case Status.RUNNING:
                return self._why_it_pauses(request)
            case Status.FINISHED:
                return "its lease is being asked for"
            case Status.WAITING_FOR_GRAMMAR if not request.grammar_ready:
                return "its grammar is not ready"
            case Status.WAITING_FOR_REMOTE_KVS if request.load_phase is LoadPhase.IN_FLIGHT:
                return request.story.detail or "its load is under way"
            case _:
                return self._why_it_waits(request, queue)

    def _why_it_waits(self, request: SchedulerRequest, queue: str) -> str:
        state = self._state
        if request.request_id in self._preempted:
            return request.story.detail
        if state.pause is not Pause.NONE:
            return f"paused: {'nobody new is admitted' if state.pause is Pause.NEW else 'nothing is scheduled'}"
        if self._preempted:
            return "nobody is admitted in a step that preempted"
        head = self._head
        if request is head or head is None:
            return request.story.detail
        if queue == "waiting" or not request.story.detail:
            return f"behind {head.request_id}, which {_after_which(state.stopped[1])}"
        return request.story.detail

    def _why_it_pauses(self, request: SchedulerRequest) -> str:
        """The rules of the running pass, in its order."""
        state, step, config = self._state, self._step, self._state.config
        known, computed, placeholders = len(request.tokens), request.num_computed_tokens, request.num_placeholders
        if state.pause is Pause.ALL:
            return "paused: nothing is scheduled"
        if computed >= known + len(request.drafts) + placeholders:
            return "all its tokens are computed; the next one is on its way"
        if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
            return "the steps in flight bring it to max_tokens"
        if computed >= config.max_model_len - 1:
            return "the steps in flight bring it to max_model_len"
        if step.budget <= 0:
            return "token budget spent"
        if request.story.detail:
            return request.story.detail
        if request.encoder_inputs and state.encoder.shortage:
            return state.encoder.shortage
        return "the running pass ended at a preemption"

    def _find_head(self) -> SchedulerRequest | None:
        """Where the waiting pass stopped: the one that keeps the very text of it."""
        state = self._state
        why = state.stopped[1]
        if len(state.waiting) and state.waiting.peek().story.detail is why:
            return state.waiting.peek()
        return next((request for request in state.skipped_waiting if request.story.detail is why), None)


def _after_which(detail: str) -> str:
    """`detail` as the end of a sentence that begins with the request."""
    return detail if detail.startswith(("needs ", "has ")) else f"waits: {detail}"
