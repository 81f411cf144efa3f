"""The scheduler core: a plain state machine. Messages and the time go in, plans and effects come out.

It composes: `state` holds, `running` and `admission` plan, `impasse` ends what would wait for ever, `results` and
`transfers` apply, `checks` proves. Invariant: equal inputs in equal order give equal plans and effects.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import takewhile
from typing import Literal

import msgspec

from actors.configuration import SchedulerConfiguration
from actors.messages.admission import BlocksReport, GrantReport, RequestStory
from actors.messages.errors import ConfigurationError, RefusalReason
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.stats import EngineStats
from actors.messages.transfer import HoldTicket, TransferOrder, TransferReport
from actors.scheduling.admission import readmit_preempted, schedule_waiting
from actors.scheduling.checks import InvariantBroken, check
from actors.scheduling.connector import Connector, TicketConnector
from actors.scheduling.grants import GrantState
from actors.scheduling.kv_events import KVEvent
from actors.scheduling.queues import RequestQueue
from actors.scheduling.request import NO_EXTRAS, LoadPhase, RequestExtras, SchedulerRequest, Status
from actors.scheduling.results import apply_result
from actors.scheduling.running import schedule_running
from actors.scheduling.state import Pause, SchedulerState
from actors.scheduling.step import BadBlocks, ScheduledStep


class SchedulerCore:
    def __init__(self, config: SchedulerConfiguration, connector: Connector | None = None) -> None:
        """Raises ConfigurationError that names the field which is out of its bounds."""
        try:
            msgspec.convert(msgspec.structs.asdict(config), SchedulerConfiguration)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"scheduler configuration: {error}") from None
        if not 0 <= config.watermark < 1:
            raise ConfigurationError(f"watermark {config.watermark} is not a fraction: give 0 or more, below 1")
        if connector is None and config.kv_connector:
            connector = TicketConnector()
        self.config = config
        self.last_step = ScheduledStep(0, 0, 0)  # what the last schedule() did, for observers
        self._state = SchedulerState(config, connector)
        self._deadlines: list[tuple[float, int, SchedulerRequest]] = []
        self._num_added = 0
        self._changed = False  # since the last schedule() that came to nothing

    # Inputs

    def add(self, request: EngineRequest, now: float, extras: RequestExtras = NO_EXTRAS) -> None:
        """One that would break the core ends at once, with an error. Raises InvariantBroken for an id that is live.

        What fits neither pool nor budgets is taken: it ends as the head that can never be scheduled (see `impasse`).
        """
        state, config = self._state, self.config
        if request.request_id in state.requests:
            raise InvariantBroken("an id that is live was added again", state.requests[request.request_id])
        self._changed = True
        added = SchedulerRequest(request, extras, now)
        state.requests[request.request_id] = added
        (state.skipped_waiting if extras.needs_grammar else state.waiting).push(added)
        self._num_added += 1
        if request.deadline < float("inf"):
            heappush(self._deadlines, (request.deadline, self._num_added, added))
        if request.ticket is not None:
            state.effects.append(HoldTicket(request.request_id, request.ticket))
        refusal = _why_impossible(config, state, added)
        if refusal is not None:
            state.end(added, FinishReason.ERROR, now, *refusal)

    def abort(self, request_id: str, now: float, reason: str = "") -> None:
        """Unknown and finished ids are ignored."""
        self._changed = True
        state = self._state
        request = state.requests.get(request_id)
        if request is not None:
            state.end(request, FinishReason.ABORT, now, text=f"aborted: {reason}" if reason else "aborted")
            return
        unsent = state.transfers.withdraw_ticket(request_id)
        if unsent is not None:
            place = state.effects.index(unsent)
            state.effects[place] = RequestOutput(request_id, finish_reason=FinishReason.ABORT, story=unsent.story)

    def expire(self, now: float) -> None:
        """Requests past their deadline end with an error, whatever they wait for."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]
            if self._state.requests.get(request.request_id) is request:
                self._changed = True
                request.story.detail = detail = self._detail(request)
                text = f"the deadline passed; the request was in state {request.story.reason}"
                text += f" ({detail})" * bool(detail)
                self._state.end(request, FinishReason.ERROR, now, RefusalReason.DEADLINE_EXCEEDED, text)

    def apply(self, message: StepResult | TransferReport, now: float) -> None:
        """Late, unknown and duplicate messages are counted and ignored."""
        if isinstance(message, StepResult):
            self.apply_step(message, {}, now)
            return
        self._changed = True
        if not self._state.transfers.apply(message, now):
            self._state.num_late_events += 1

    def apply_step(self, result: StepResult | None, bad_blocks: BadBlocks, now: float) -> None:
        """A result together with the loads that were found bad in that step. None: the step had no rows."""
        self._changed = True
        apply_result(self._state, result, bad_blocks, now)

    def set_drafts(self, request_id: str, tokens: list[int]) -> None:
        """Draft tokens for its next step; one that is unknown or has prompt left to compute gets none."""
        request = self._state.requests.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            request.drafts = () if request.is_prefill_chunk else list(tokens)

    def grammar_ready(self, request_id: str) -> None:
        self._changed = True
        request = self._state.requests.get(request_id)
        if request is not None:
            request.grammar_ready = True

    def pause(self, mode: Literal["none", "new", "all"]) -> None:
        self._changed = True
        self._state.pause = Pause(mode)

    def reset_prefix_cache(self, now: float, preempt_running: bool = False) -> bool:
        """Forgets every cached block, if nobody holds one. What is in flight of the preempted is dropped."""
        self._changed = True
        state = self._state
        while preempt_running and state.running:
            request = state.running.pop()
            if self.config.async_scheduling:
                request.begin_epoch()
            state.preempt(request, now, "the prefix cache was reset")
        if state.kv.pool.num_free != state.kv.pool.usable_blocks:
            return False
        state.kv.cache.clear()
        return True

    # Outputs

    def schedule(self, now: float) -> StepPlan:
        """An empty plan (no rows) is not dispatched: it takes no step number, carries no drops and gets no result."""
        state = self._state
        budget = 0 if state.pause is Pause.ALL else self.config.max_num_batched_tokens
        state.num_barren_steps += 1
        step = ScheduledStep(state.num_steps + 1, budget, self.config.encoder_budget)
        schedule_running(state, step, now)
        if state.pause is Pause.NONE and not step.preempted:
            schedule_waiting(state, step, now)
        elif state.pause is Pause.NEW and self.config.readmit_while_pausing and not step.preempted:
            readmit_preempted(state, step, now)
        assert sum(step.counts) <= budget
        assert len(state.running) <= self.config.max_num_seqs
        self.last_step = step
        if not step.requests:
            self._changed = bool(step.preempted)
            return step.plan()
        state.num_steps = step.step
        for request in step.requests:
            request.last_step = step.step
            request.known_to_worker = True
        state.in_flight[step.step] = step
        dropped, state.dropped = tuple(state.dropped), {}
        return step.plan(dropped, state.encoder.take_evicted())

    def take_effects(self) -> list[RequestOutput | TransferOrder]:
        effects, self._state.effects = self._state.effects, []
        return effects

    def take_kv_events(self) -> list[KVEvent]:
        """What the prefix cache has stored and forgotten; none without `kv_events`. Changes no plan."""
        announced = self._state.kv.announced
        return [] if announced is None else announced.take_events()

    def has_runnable(self) -> bool:
        """Whether schedule() could plan, admit or load something now. After it came to nothing: not before an input."""
        state = self._state
        if not self._changed or state.pause is Pause.ALL:
            return False
        if any(_lacks_tokens(request) for request in state.running):
            return True
        if len(state.running) >= self.config.max_num_seqs:
            return False
        if state.pause is Pause.NEW:
            return self.config.readmit_while_pausing and self._waits_to_go_on()
        return bool(len(state.waiting)) or any(_may_be_promoted(request) for request in state.skipped_waiting)

    def has_started(self) -> bool:
        """Whether a request has begun to run and is not at its end: what a pause "new" waits for."""
        return bool(self._state.running) or (self.config.readmit_while_pausing and self._waits_to_go_on())

    def _waits_to_go_on(self) -> bool:
        state = self._state
        return any(request.status is Status.PREEMPTED for request in (*state.waiting, *state.skipped_waiting))

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, request = self._deadlines[0]
            if self._state.requests.get(request.request_id) is request:
                return deadline
            heappop(self._deadlines)
        return None

    # Views

    @property
    def running(self) -> list[SchedulerRequest]:
        return self._state.running

    @property
    def waiting(self) -> RequestQueue:
        return self._state.waiting

    @property
    def skipped_waiting(self) -> RequestQueue:
        return self._state.skipped_waiting

    @property
    def num_free_blocks(self) -> int:
        return self._state.kv.pool.num_free

    @property
    def num_common_prefix_blocks(self) -> int:
        """Leading blocks of the first running request that all who hold blocks share: a hint for cascade attention."""
        kv, running = self._state.kv, self._state.running
        num_holders = len(kv.ledger.live)
        blocks = running[0].block_ids if running else []
        return sum(1 for _ in takewhile(lambda block: kv.pool.ref_counts[block] == num_holders, blocks))

    def live_request_ids(self) -> list[str]:
        return list(self._state.requests)

    def live(self, request_id: str) -> SchedulerRequest | None:
        return self._state.requests.get(request_id)

    def story(self, request_id: str) -> RequestStory | None:
        request = self._state.requests.get(request_id)
        if request is None:
            return None
        *closed, last = request.story.intervals()
        last = msgspec.structs.replace(last, detail=self._detail(request))
        return RequestStory(request_id, finished=False, intervals=(*closed, last))

    def _detail(self, request: SchedulerRequest) -> str:
        waits = request.status in (Status.WAITING, Status.PREEMPTED)
        return self._state.why_it_waits(request) if waits else request.story.detail

    def stats(self) -> EngineStats:
        state = self._state
        blocks = state.kv.ledger.count()
        return EngineStats(
            running=len(state.running),
            waiting=len(state.waiting),
            skipped=len(state.skipped_waiting),
            blocks_free=state.kv.pool.num_free,
            blocks_held=blocks[GrantState.HELD],
            blocks_fenced=blocks[GrantState.FENCED],
            blocks_leased=blocks[GrantState.LEASED],
            blocks_quarantined=blocks[GrantState.QUARANTINED],
            prefix_hit_tokens_total=state.num_prefix_hit_tokens,
            preemptions_total=state.num_preemptions,
            late_events_total=state.num_late_events,
            paused=state.pause.value,
        )

    def blocks_report(self, now: float) -> BlocksReport:
        state = self._state
        stats = self.stats()
        return BlocksReport(
            usable=state.kv.pool.usable_blocks,
            free=stats.blocks_free,
            held=stats.blocks_held,
            fenced=stats.blocks_fenced,
            leased=stats.blocks_leased,
            quarantined=stats.blocks_quarantined,
            grants=tuple(
                GrantReport(
                    request_id=grant.request_id,
                    generation=grant.generation,
                    state=grant.state.name.lower(),
                    blocks=len(grant.block_ids),
                    age_s=max(now - grant.since, 0.0),
                    reason=grant.reason or state.why_held(grant),
                )
                for grant in state.kv.ledger.live.values()
            ),
        )

    def holds_encoder_output(self, request_id: str, item_hash: str) -> bool:
        """Whether the request has a reference on the encoder output, cached or to be computed by a planned step."""
        return self._state.encoder.is_held(request_id, item_hash)

    def check(self) -> None:
        """Raises InvariantBroken, with the request's story."""
        check(self._state)


def _why_impossible(
    config: SchedulerConfiguration, state: SchedulerState, request: SchedulerRequest
) -> tuple[RefusalReason, str] | None:
    num_tokens = len(request.tokens)
    if num_tokens == 0:
        return RefusalReason.INVALID_REQUEST, "the prompt is empty"
    if num_tokens >= config.max_model_len:
        return (
            RefusalReason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_tokens} tokens, the context {config.max_model_len}: no room for an answer",
        )
    if state.connector is None and (request.ticket is not None or request.engine_request.do_remote_decode):
        return RefusalReason.INVALID_REQUEST, "this engine has no KV connector: it neither loads nor sends blocks"
    return None


def _lacks_tokens(request: SchedulerRequest) -> bool:
    ahead = len(request.drafts) + request.num_placeholders
    return request.num_computed_tokens < len(request.tokens) + ahead


def _may_be_promoted(request: SchedulerRequest) -> bool:
    if request.status is Status.WAITING_FOR_GRAMMAR:
        return request.grammar_ready
    return request.load_phase is not LoadPhase.IN_FLIGHT
