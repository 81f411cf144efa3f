"""What the scheduler knows, and the few transitions that every part of it uses: preempt, finish, give blocks back.

Owns the queues, the steps in flight and the effects. Invariant: a live request is in exactly one of `running`,
`waiting` and `skipped_waiting`, or its output waits for a lease (`TransferBook.leases`).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from actors.configuration import SchedulerConfiguration
from actors.messages.errors import RefusalReason
from actors.messages.plan import StepResult
from actors.messages.request import FinishReason, RequestOutput
from actors.messages.transfer import ReleaseTicket, TransferOrder
from actors.scheduling.connector import Connector
from actors.scheduling.encoder import EncoderCache
from actors.scheduling.grants import Grant, GrantState
from actors.scheduling.kv_manager import KVManager
from actors.scheduling.queues import FcfsQueue, PriorityQueue, RequestQueue
from actors.scheduling.request import LoadPhase, SchedulerRequest, Status
from actors.scheduling.step import BadBlocks, ScheduledStep
from actors.scheduling.transfers import TransferBook


class Pause(Enum):
    NONE = "none"
    NEW = "new"  # what runs goes on, nobody is admitted
    ALL = "all"


Ending = Literal[FinishReason.ABORT, FinishReason.ERROR]


class SchedulerState:
    def __init__(self, config: SchedulerConfiguration, connector: Connector | None) -> None:
        self.config = config
        self.connector = connector
        self.requests: dict[str, SchedulerRequest] = {}
        self.running: list[SchedulerRequest] = []
        self.waiting = self._new_queue()
        self.skipped_waiting = self._new_queue()
        self.kv = KVManager(config)
        self.encoder = EncoderCache(config)
        self.transfers = TransferBook(self)
        self.in_flight: dict[int, ScheduledStep] = {}  # oldest first
        self.early_results: dict[int, tuple[StepResult, BadBlocks]] = {}  # an older step's has not come
        self.num_steps = 0
        self.pause = Pause.NONE
        # Admitted with some of the prefill still to come, loads included: the next load leaves room for the rest.
        self.unfinished_prefills: dict[str, SchedulerRequest] = {}
        self.dropped: dict[str, None] = {}
        self.effects: list[RequestOutput | TransferOrder] = []
        self.stopped: tuple[float, str] = (float("-inf"), "")  # when and why admission last stopped at its head
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self.num_late_events = 0
        self.num_barren_steps = 0  # schedule()s since the last token
        self._fences = config.fence_frees or (config.async_scheduling and config.kv_connector)

    def _new_queue(self) -> RequestQueue:
        return PriorityQueue() if self.config.policy == "priority" else FcfsQueue()

    def queued(self) -> list[SchedulerRequest]:
        """Both queues, in the order of service."""
        queued = [*self.skipped_waiting, *self.waiting]
        if self.config.policy == "priority":
            queued.sort(key=lambda request: request.order)
        return queued

    def take_from_queue(self, request: SchedulerRequest) -> None:
        (self.waiting if request in self.waiting else self.skipped_waiting).remove(request)

    # Blocks

    def give_back(self, request: SchedulerRequest, grant: Grant, now: float) -> None:
        """The owner's last word on a grant: free, or fenced while a dispatched step still touches its blocks."""
        if self._fences and request.last_step in self.in_flight:
            # The newest step, not the request's own: transfers are not ordered with steps.
            fence = next(reversed(self.in_flight))
            self.kv.ledger.turn(grant, GrantState.FENCED, now, f"step {fence} is in flight", fence)
        else:
            self.kv.ledger.release(grant)

    def why_held(self, grant: Grant) -> str:
        request = self.requests.get(grant.request_id)
        if request is not None and request.grant is grant:
            return request.story.reason
        return "its request is gone, its load is not"

    # Transitions

    def preempt(self, request: SchedulerRequest, now: float, detail: str) -> None:
        """Frees its blocks; its tokens stay. The caller has taken it out of `running`."""
        assert request.grant is not None
        self.give_back(request, request.grant, now)
        request.forget_blocks()
        self.encoder.release_all(request)
        self.unfinished_prefills.pop(request.request_id, None)
        request.drafts = ()
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status = Status.PREEMPTED
        request.story.turn("preempted", now, detail)
        self._drop(request)
        self.waiting.push_front(request)

    def finish(
        self,
        request: SchedulerRequest,
        reason: FinishReason,
        now: float,
        tokens: tuple[int, ...],
        stop_token_id: int | None = None,
    ) -> None:
        """It has its last token. The caller takes it out of its queue."""
        output = RequestOutput(
            request.request_id,
            token_ids=tokens,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
        )
        self._leave(request, now)
        num_leased = 0
        if self.connector is not None:
            num_leased = self.connector.num_blocks_to_lease(request, self.config.block_size)
        grant, request.grant = request.grant, None
        if request.load_phase is LoadPhase.IN_FLIGHT:
            # Preempted and loading again when the token of an older step ended it.
            self.transfers.cancel_load_of(request)
            grant = None
        if num_leased and grant is None:
            output = RequestOutput(
                request.request_id,
                finish_reason=FinishReason.ERROR,
                error=RefusalReason.KV_SEND_FAILED.value,
                error_text="the request was preempted when it ended: its KV blocks are gone",
            )
        if grant is not None and num_leased:
            if num_leased < len(grant.block_ids):
                rest = self.kv.ledger.split(grant, num_leased, now, move_head=False)
                self.give_back(request, rest, now)
            self.transfers.start_lease(request, grant, output, now)
            return
        if grant is not None:
            self.give_back(request, grant, now)
        self.send_last(request, output, now)

    def end(
        self, request: SchedulerRequest, reason: Ending, now: float, error: RefusalReason | None = None, text: str = ""
    ) -> None:
        """It ends without its answer: aborted, overdue, failed. Takes it out of wherever it is."""
        if request.status is Status.FINISHED:
            self.transfers.revoke_lease_of(request)
        else:
            self._take_out(request)
            self._leave(request, now)
            grant, request.grant = request.grant, None
            if request.load_phase is LoadPhase.IN_FLIGHT:
                self.transfers.cancel_load_of(request)
            elif grant is not None:
                self.give_back(request, grant, now)
        request.story.detail = "; ".join(filter(None, (request.story.detail, text)))
        output = RequestOutput(
            request.request_id,
            finish_reason=reason,
            error=None if error is None else error.value,
            error_text=None if error is None else text,
        )
        self.send_last(request, output, now)

    def send_last(self, request: SchedulerRequest, output: RequestOutput, now: float) -> None:
        """The output that ends the request for its client; with it the core forgets the request."""
        del self.requests[request.request_id]
        self.effects.append(
            RequestOutput(
                output.request_id,
                output.token_ids,
                output.finish_reason,
                output.stop_token_id,
                output.error,
                output.error_text,
                output.ticket,
                output.num_cached_tokens,
                request.story.ended(now),
            )
        )

    @property
    def is_at_a_standstill(self) -> bool:
        """So long without a token that it may well be for ever: the reference waits on, we help ourselves."""
        return self.num_barren_steps > self.config.standstill_patience

    def why_it_waits(self, request: SchedulerRequest) -> str:
        """Its own reason, or that of the head behind which it waits (or waited, when it is admitted)."""
        if self.pause is not Pause.NONE:
            return "the engine is paused" + ": nobody is admitted" * (self.pause is Pause.NEW)
        when, detail = self.stopped
        if request.story.detail or request.story.start > when:
            return request.story.detail
        return f"behind one that waits: {detail}"

    def discharge_ticket(self, request: SchedulerRequest) -> None:
        """The request will not read what its ticket names. Harmless when there is none, or none any more."""
        if request.ticket is not None:
            self.effects.append(ReleaseTicket(request.request_id, request.ticket))
            request.ticket = None

    def _leave(self, request: SchedulerRequest, now: float) -> None:
        request.status = Status.FINISHED
        self.unfinished_prefills.pop(request.request_id, None)
        self.encoder.release_all(request)
        self.discharge_ticket(request)
        self._drop(request)

    def _drop(self, request: SchedulerRequest) -> None:
        if request.known_to_worker:
            request.known_to_worker = False
            self.dropped[request.request_id] = None

    def _take_out(self, request: SchedulerRequest) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.take_from_queue(request)
