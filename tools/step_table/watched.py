"""A SchedulerCore that is watched while it works: what each call did goes into the step table's rows.

The core itself is the one that serves; each override calls it and compares before with after. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    GrantLease,
    LeaseDenied,
    LeaseExpired,
    LeaseGranted,
    PeerLost,
    TransferFailed,
    TransferOrder,
    TransferReport,
)
from actors.scheduling.connector import Connector
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import NO_EXTRAS, RequestExtras, SchedulerRequest, Status
from actors.scheduling.step import BadBlocks, ScheduledStep
from tools.step_table.blocks import BlockWatch
from tools.step_table.collector import Collector
from tools.step_table.reasons import Reasons
from tools.step_table.result_rows import ResultRows
from tools.step_table.rows import Step, StepRow

_SHOWN_IDS = 6


class WatchedCore(SchedulerCore):
    def __init__(
        self, config: SchedulerConfiguration, connector: Connector | None = None, *, collector: Collector
    ) -> None:
        super().__init__(config, connector)
        self.collector = collector
        self.blocks = BlockWatch()
        self._is_watched = True
        self._num_effects_seen = 0
        self._live_at_plan: dict[str, SchedulerRequest] = {}  # of the newest plan

    def watch(self, is_watched: bool) -> None:
        """Not watched, it costs nothing beside the core itself. What happens meanwhile is in no row."""
        if is_watched and not self._is_watched:
            self.blocks.look(self._state.kv.ledger.live)
            self.collector.start_with(self.blocks.held())
            self._num_effects_seen = len(self._state.effects)
        self._is_watched = is_watched

    # Inputs

    def add(self, request: EngineRequest, now: float, extras: RequestExtras = NO_EXTRAS) -> None:
        super().add(request, now, extras)
        if self._is_watched:
            self.collector.added(request.request_id)
            self._look(self.collector.newest)

    def abort(self, request_id: str, now: float, reason: str = "") -> None:
        before = list(self._state.effects) if self._is_watched else []
        known = request_id in self._state.requests
        super().abort(request_id, now, reason)
        if self._is_watched:
            because = f" ({reason})" if reason else ""
            withdrawn = not known and before != self._state.effects
            ignored = "" if known or withdrawn else ": not here"
            self.collector.tell(f"abort {request_id}{because}{ignored}")
            if withdrawn:
                self.collector.event(self.collector.newest, request_id, "aborted before its ticket left")
            self._look(self.collector.newest)

    def expire(self, now: float) -> None:
        super().expire(now)
        if self._is_watched and len(self._state.effects) != self._num_effects_seen:
            self.collector.tell("deadlines passed")
            self._look(self.collector.newest)

    def apply(self, message: StepResult | TransferReport, now: float) -> None:
        late = self._state.num_late_events
        super().apply(message, now)
        if not self._is_watched or isinstance(message, StepResult):
            return  # a result has come through apply_step
        step = self.collector.newest
        if isinstance(message, PeerLost):
            self.collector.tell(f"peer {message.engine_id} lost: {message.reason}")
            return
        text = _report(message)
        if self._state.num_late_events != late:
            self.collector.tell(f"{message.request_id} {text}, which is late: ignored")
        else:
            self.collector.tell(f"{message.request_id} {text}")
            self.collector.event(step, message.request_id, text)
        self._look(step)

    def apply_step(self, result: StepResult | None, bad_blocks: BadBlocks, now: float) -> None:
        if not self._is_watched:
            super().apply_step(result, bad_blocks, now)
            return
        state, late = self._state, self._state.num_late_events
        returning = None if result is None else state.in_flight.get(result.step)
        before = ResultRows(self.collector, state, returning, bool(bad_blocks))
        super().apply_step(result, bad_blocks, now)
        step = self.collector.newest
        if result is not None:
            step = self.collector.returned(result.step) or step
            is_late = state.num_late_events != late
            self.collector.tell(f"result of step {result.step}" + ", which is late: ignored" * is_late, step)
            step.execute_s, step.sample_s = result.execute_s, result.sample_s
        else:
            self.collector.tell("the empty step comes back")
        before.apply(step, result)
        self._look(step)

    def grammar_ready(self, request_id: str) -> None:
        super().grammar_ready(request_id)
        if self._is_watched:
            self.collector.tell(f"grammar of {request_id} is ready")

    def pause(self, mode: Literal["none", "new", "all"]) -> None:
        super().pause(mode)
        if self._is_watched:
            self.collector.tell({"none": "resume", "new": "pause: nobody new", "all": "pause: nothing"}[mode])

    def reset_prefix_cache(self, now: float, preempt_running: bool = False) -> bool:
        preempted = list(self._state.running) if preempt_running else []
        done = super().reset_prefix_cache(now, preempt_running)
        if self._is_watched:
            self.collector.tell("prefix cache reset" if done else "prefix cache not reset: blocks are held")
            for request in reversed(preempted):
                row = self.collector.row(self.collector.newest, request.request_id)
                row.queue, row.status, row.num_computed_tokens_after = "waiting", request.status.name, 0
                self.collector.event(self.collector.newest, request.request_id, f"preempted: {request.story.detail}")
            self._look(self.collector.newest)
        return done

    # Outputs

    def take_effects(self) -> list[RequestOutput | TransferOrder]:
        self._num_effects_seen = 0
        return super().take_effects()

    def schedule(self, now: float) -> StepPlan:
        if not self._is_watched:
            return super().schedule(now)
        state = self._state
        before = {
            request: (
                request.num_computed_tokens,
                len(request.tokens),
                len(request.drafts),
                request.num_placeholders,
            )
            for request in state.requests.values()
        }
        self._live_at_plan = dict(state.requests)
        free = state.kv.pool.num_free
        plan = super().schedule(now)
        planned = self.last_step
        step = Step(
            number=planned.step,
            has_rows=bool(planned.requests),
            num_scheduled_tokens=sum(planned.counts),
            num_scheduled_requests=len(planned.requests),
            token_budget=sum(planned.counts) + planned.budget,
            free_before=free,
        )
        self.collector.begin(step)
        self.collector.tell(_planned(planned))
        reasons = Reasons(state, planned)
        for request, queue, place in self._in_order(before, planned):
            if self.collector.only in (None, request.request_id):
                row = _row(step, planned, request, queue, place, before[request])
                if place is None and state.requests.get(request.request_id) is request:
                    row.why = reasons.why(request, queue)
                self.collector.put(step, row)
        self._look(step)
        return plan

    def _in_order(
        self, before: Iterable[SchedulerRequest], planned: ScheduledStep
    ) -> Iterator[tuple[SchedulerRequest, str, int | None]]:
        """Everyone who was live, with its queue and its row of the plan: first who is scheduled, in planning order."""
        state = self._state
        for place, request in enumerate(planned.requests):
            yield request, "running", place
        scheduled = set(planned.requests)
        seen = set(scheduled)
        for name, queue in (("running", state.running), ("waiting", state.waiting), ("skipped", state.skipped_waiting)):
            for request in queue:
                if request not in scheduled:
                    seen.add(request)
                    yield request, name, None
        for request in before:
            if request not in seen:
                yield request, "", None

    def _look(self, step: Step) -> None:
        """What the call did to blocks, and whom it ended."""
        state, collector = self._state, self.collector
        for effect in state.effects[self._num_effects_seen :]:
            if isinstance(effect, GrantLease):
                collector.event(step, effect.request_id, "asks for a lease")
            elif isinstance(effect, RequestOutput) and effect.finish_reason is not None:
                self._ended(step, effect)
        self._num_effects_seen = len(state.effects)
        collector.blocks(step, self.blocks.look(state.kv.ledger.live))
        collector.newest.free_after = state.kv.pool.num_free

    def _ended(self, step: Step, output: RequestOutput) -> None:
        row = self.collector.row(step, output.request_id)
        row.queue, row.status = "", Status.FINISHED.name
        if not row.num_scheduled_tokens:  # the plan is not about it any more: it waits for nothing
            row.why, row.num_drafts, row.num_placeholders = "", 0, 0
            if row.num_known_tokens and output.request_id in self._live_at_plan:
                row.num_known_tokens = len(self._live_at_plan[output.request_id].tokens)
        reason = output.finish_reason
        text = f"finished: {reason}" if reason is not FinishReason.ABORT else "aborted"
        if output.error is not None:
            text = f"ended: {output.error}: {output.error_text}"
        self.collector.event(step, output.request_id, text)
        self.collector.tell(f"{output.request_id} {text}", step)


def _row(
    step: Step,
    planned: ScheduledStep,
    request: SchedulerRequest,
    queue: str,
    place: int | None,
    before: tuple[int, int, int, int],
) -> StepRow:
    name = request.request_id
    computed, known, drafts, placeholders = before
    row = StepRow(
        step=step.label,
        request_id=name,
        queue=queue,
        status=request.status.name,
        num_computed_tokens=computed,
        num_computed_tokens_after=request.num_computed_tokens,
        num_known_tokens=known,
        num_drafts=drafts,
        num_placeholders=placeholders,
        num_prefix_hit_tokens=planned.cached.get(name, 0),
        num_remote_tokens=planned.loading.get(name, 0),
    )
    if place is not None:
        row.num_scheduled_tokens = planned.counts[place]
        row.num_computed_tokens = planned.computed[place]
        row.num_computed_tokens_after = planned.computed[place] + planned.counts[place]
        row.num_drafts_scheduled = len(planned.drafts.get(name, ()))
        row.num_drafts = max(drafts, row.num_drafts_scheduled)
        if computed == 0:
            row.num_remote_tokens = planned.computed[place] - row.num_prefix_hit_tokens
    row.events += [kind for kind in ("new", "resumed", "preempted") if name in getattr(planned, kind)]
    if name in planned.loading:
        row.events.append("loading")
    return row


def _planned(step: ScheduledStep) -> str:
    rows = len(step.requests)
    parts = [f"plan: {rows} row{'s' * (rows != 1)}" if rows else "plan without rows"]
    parts += [f"{kind} {_ids(ids)}" for kind in ("preempted", "new", "resumed") if (ids := getattr(step, kind))]
    if step.loading:
        parts.append(f"loading {_ids(list(step.loading))}")
    return "; ".join(parts)


def _ids(ids: list[str]) -> str:
    more = len(ids) - _SHOWN_IDS
    return ", ".join(ids[:_SHOWN_IDS]) + (f" and {more} more" if more > 0 else "")


def _report(report: TransferReport) -> str:
    match report:
        case BlocksLanded():
            measured = f" ({report.num_bytes:,} bytes in {report.seconds * 1e3:.1f} ms)" if report.num_bytes else ""
            return f"landed{measured}"
        case TransferFailed():
            detail = f" ({report.detail})" if report.detail else ""
            return f"load failed: {report.reason}{detail}"
        case BlocksQuiet():
            return "failed load is quiet"
        case BlocksSent():
            return "sent"
        case LeaseGranted():
            return "lease granted"
        case LeaseDenied():
            return f"lease denied: {report.reason}"
        case LeaseExpired():
            return "lease expired"
        case PeerLost():
            return "peer lost"
