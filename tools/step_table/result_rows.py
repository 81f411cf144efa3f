"""What a result does to the rows of its step: tokens out, drafts accepted, rows for nothing, roll-backs."""

from __future__ import annotations

from actors.messages.plan import StepResult
from actors.scheduling.request import SchedulerRequest, Status
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import ScheduledStep
from tools.step_table.collector import Collector
from tools.step_table.rows import Step


class ResultRows:
    """Made before the core takes the result, applied after."""

    def __init__(
        self, collector: Collector, state: SchedulerState, returning: ScheduledStep | None, has_bad_blocks: bool
    ) -> None:
        self._collector, self._returning = collector, returning
        requests = [] if returning is None else returning.requests
        self._known = [len(request.tokens) for request in requests]
        self._was_live = [request.status is not Status.FINISHED for request in requests]
        self._computed: list[tuple[SchedulerRequest, int, int]] = []
        if has_bad_blocks:
            self._computed = [
                (request, request.num_computed_tokens, request.epoch) for request in state.requests.values()
            ]

    def apply(self, step: Step, result: StepResult | None) -> None:
        for request, computed, epoch in self._computed:
            is_loading = request.status is Status.WAITING_FOR_REMOTE_KVS and request.load_failed
            if request.epoch != epoch or (is_loading and request.num_computed_tokens < computed):
                row = self._collector.row(step, request.request_id)
                row.num_computed_tokens_after = request.num_computed_tokens
                text = f"blocks did not arrive: back to {request.num_computed_tokens} computed"
                self._collector.event(step, request.request_id, text)
                self._collector.tell(f"{request.request_id} {text}", step)
        if self._returning is not None and result is not None:
            self._apply_rows(step, self._returning, result)

    def _apply_rows(self, step: Step, planned: ScheduledStep, result: StepResult) -> None:
        counts = memoryview(result.num_sampled).cast("i")
        for place, request in enumerate(planned.requests):
            row = step.rows.get(request.request_id)
            if row is None:
                continue
            if not self._was_live[place] or planned.epochs[place] != request.epoch:
                self._collector.event(step, request.request_id, "came back for nothing")
                row.blocks_held = self._collector.held(request.request_id)
                continue
            row.token_ids = request.tokens[self._known[place] :]
            count, expected = counts[place], planned.sampled[place]
            if row.status != Status.PREEMPTED.name:  # by a reset of the prefix cache, after the plan
                row.num_computed_tokens_after -= max(expected - count, 0)
            if row.num_drafts_scheduled:
                row.num_drafts_accepted = max(count - 1, 0)
