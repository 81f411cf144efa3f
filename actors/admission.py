"""AdmissionActor: the door of the engine. It owns the output streams, the queue limits, aborts and finished stories.

It knows nothing of blocks or steps; it and the scheduler meet only through messages. Invariant: every accepted request
is in `_live` until its finish was handed to its stream, and its stream ends exactly once. A refused request with a
ticket has its release obligation discharged here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.messages.admission import (
    AbortRequest,
    AddRequest,
    PublishOutputs,
    ReportBlocks,
    RequestStory,
    ResponseClosed,
    StoryOf,
    SubmitRequest,
)
from actors.messages.control import ControlMessage, PauseScheduler, ResetPrefixCache, ResumeScheduler
from actors.messages.errors import KvyardError, RefusalReason, RequestRefused
from actors.messages.request import EngineRequest, RequestOutput, StoryInterval
from actors.messages.supervision import Drain
from actors.messages.transfer import ReleaseTicket
from actors.outbox import Outbox
from actors.output_stream import OutputStream

AdmissionMessage = (
    SubmitRequest
    | AbortRequest
    | PublishOutputs
    | StoryOf
    | ReportBlocks
    | ControlMessage
    | ResponseClosed
    | ReleaseTicket
    | Drain
)
SchedulerOrder = AddRequest | AbortRequest | StoryOf | ReportBlocks | ControlMessage

FINISHED_STORIES = 1024
ASK_SECONDS = 5.0


def check_capacity(num_prompt: int, max_tokens: int, block_size: int, capacity_blocks: int) -> None:
    """Raises RequestRefused for a request that can never fit the pool. The last sampled token's KV is never written."""
    needed = math.ceil((num_prompt + max_tokens - 1) / block_size)
    if needed > capacity_blocks:
        raise RequestRefused(
            RefusalReason.EXCEEDS_KV_CAPACITY,
            f"prompt and max_tokens need {needed} KV blocks; this engine has {capacity_blocks}: "
            "shorten the prompt, lower max_tokens, or start the engine with more --kv-memory",
        )


class AdmissionLimits(msgspec.Struct, frozen=True):
    """What the AdmissionActor refuses. Tokens and blocks; `capacity_blocks` is the usable KV pool."""

    max_model_len: int
    block_size: int
    capacity_blocks: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_unread_tokens: int = 4096  # of one stream, before its reader is too slow


class _Live:
    __slots__ = ("first_token_seen", "num_prompt_tokens", "response_closed", "stream")

    def __init__(self, stream: OutputStream, num_prompt_tokens: int) -> None:
        self.stream, self.num_prompt_tokens, self.first_token_seen = stream, num_prompt_tokens, False
        self.response_closed: ResponseClosed | None = None  # the client left before the scheduler knew


class AdmissionActor(Actor[AdmissionMessage]):
    mailbox_size = 4096

    def __init__(
        self,
        limits: AdmissionLimits,
        scheduler: Address[SchedulerOrder],
        transfer: Address[ReleaseTicket],
        clock: Callable[[], float],
    ) -> None:
        super().__init__("admission")
        self._limits, self._clock = limits, clock
        self._scheduler = scheduler
        self._orders: Outbox[SchedulerOrder] = Outbox(scheduler)
        self._releases: Outbox[ReleaseTicket] = Outbox(transfer)
        self._live: dict[str, _Live] = {}
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()
        self._waiting_requests = self._waiting_tokens = 0
        self._seconds_per_admission = 0.0  # moving average between two first tokens while a queue exists
        self._last_first_token: float | None = None
        self._drained: Reply | None = None
        self.draining = False

    async def started(self) -> None:
        self.tasks.start_soon(self._orders.run)
        self.tasks.start_soon(self._releases.run)

    async def receive(self, message: AdmissionMessage, reply: Reply) -> None:
        match message:
            case PublishOutputs():
                for output in message.outputs:
                    self._publish(output)
            case SubmitRequest():
                self._submit(message, reply)
            case AbortRequest():
                self._abort(message)
            case ResponseClosed():
                self._close_story(message)
            case StoryOf():
                self._tell_story(message, reply)
            case ReportBlocks():
                self.tasks.start_soon(self._forward, message, reply, ASK_SECONDS)
            case PauseScheduler() | ResumeScheduler() | ResetPrefixCache():
                self._last_first_token = None  # how long a pause lasts says nothing of how fast the queue moves
                # How long it may take is the asker's to say: a pause with mode wait takes as long as the last request.
                self._orders.pass_on(message, reply)
            case ReleaseTicket():
                self._releases.post(message)
            case Drain():
                self.draining, self._drained = True, reply

    async def settled(self) -> None:
        if self._drained is not None and not self._live:
            self._drained.send(None)
            self._drained = None

    async def stopped(self) -> None:
        for live in self._live.values():
            live.stream.fail(
                RefusalReason.ENGINE_UNAVAILABLE, "the engine ended before the answer was complete; send it again"
            )
        self._live.clear()

    def _submit(self, message: SubmitRequest, reply: Reply) -> None:
        request = message.request
        try:
            self._check(request)
        except RequestRefused as refusal:
            if request.ticket is not None:
                self._releases.post(ReleaseTicket(request.request_id, request.ticket))
            reply.fail(refusal)
            return
        stream = OutputStream(request.request_id, self._limits.max_unread_tokens)
        self._live[request.request_id] = _Live(stream, len(request.prompt_token_ids))
        self._waiting_requests += 1
        self._waiting_tokens += len(request.prompt_token_ids)
        self._orders.post(AddRequest(request, self._clock(), message.trace_id))
        reply.send(stream)

    def _check(self, request: EngineRequest) -> None:
        limits, num_prompt = self._limits, len(request.prompt_token_ids)
        if self.draining:
            raise RequestRefused(RefusalReason.ENGINE_UNAVAILABLE, "the engine is shutting down; send it to another")
        if request.request_id in self._live:
            raise RequestRefused(
                RefusalReason.INVALID_REQUEST, f"a request with id {request.request_id!r} is running already"
            )
        if num_prompt < 1 or request.max_tokens < 1:
            raise RequestRefused(
                RefusalReason.INVALID_REQUEST,
                f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}; each must be at least 1",
            )
        if num_prompt + request.max_tokens > limits.max_model_len:
            raise RequestRefused(
                RefusalReason.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, together "
                f"{num_prompt + request.max_tokens}; the context holds {limits.max_model_len}",
                param="max_tokens",
            )
        check_capacity(num_prompt, request.max_tokens, limits.block_size, limits.capacity_blocks)
        if request.deadline <= self._clock():
            raise RequestRefused(RefusalReason.DEADLINE_EXCEEDED, "the deadline had passed when the request arrived")
        # An empty queue takes any prompt, else one longer than the limit could never be served.
        too_many = self._waiting_requests >= limits.max_waiting_requests
        too_long = self._waiting_requests > 0 and self._waiting_tokens + num_prompt > limits.max_waiting_tokens
        if too_many or too_long:
            raise RequestRefused(
                RefusalReason.QUEUE_FULL,
                f"{self._waiting_requests} requests with {self._waiting_tokens} prompt tokens wait already; "
                f"the limits are {limits.max_waiting_requests} and {limits.max_waiting_tokens}",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> float:
        """Seconds until half of the queue is likely to have moved on."""
        return min(60.0, max(1.0, math.ceil(self._waiting_requests / 2 * self._seconds_per_admission)))

    def _publish(self, output: RequestOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        if not live.first_token_seen and (output.token_ids or output.finish_reason is not None):
            live.first_token_seen = True
            self._left_the_queue(live)
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._remember_story(output, live.response_closed)
        if not live.stream.put(output) and output.finish_reason is None:
            text = f"the client has left more than {self._limits.max_unread_tokens} tokens unread"
            live.stream.fail(RefusalReason.SLOW_READER, text)
            self._abort(AbortRequest(output.request_id, "slow reader"))

    def _left_the_queue(self, live: _Live) -> None:
        self._waiting_requests -= 1
        self._waiting_tokens -= live.num_prompt_tokens
        now = self._clock()
        if self._last_first_token is not None and self._waiting_requests:
            gap = now - self._last_first_token
            self._seconds_per_admission += 0.1 * (gap - self._seconds_per_admission)
        self._last_first_token = now

    def _abort(self, message: AbortRequest) -> None:
        """The request stays live until the scheduler's finish comes: only then is it known to be gone."""
        if message.request_id in self._live:
            self._orders.post(message)

    def _remember_story(self, output: RequestOutput, closed: ResponseClosed | None) -> None:
        now = self._clock()
        last = output.story[-1].end if output.story else None
        tail = StoryInterval("response", now if last is None else last, None)
        self._stories[output.request_id] = RequestStory(output.request_id, False, (*output.story, tail))
        if closed is not None:
            self._close_story(closed)
        while len(self._stories) > FINISHED_STORIES:
            self._stories.popitem(last=False)

    def _close_story(self, message: ResponseClosed) -> None:
        live = self._live.get(message.request_id)
        if live is not None:
            live.response_closed = message
            return
        story = self._stories.get(message.request_id)
        if story is None or story.finished:
            return
        *before, tail = story.intervals
        closed = msgspec.structs.replace(tail, end=self._clock(), detail=message.outcome)
        self._stories[message.request_id] = RequestStory(story.request_id, True, (*before, closed))

    def _tell_story(self, message: StoryOf, reply: Reply) -> None:
        if message.request_id in self._stories:
            reply.send(self._stories[message.request_id])
        elif message.request_id in self._live:
            self.tasks.start_soon(self._forward, message, reply, ASK_SECONDS)
        else:
            reply.send(None)

    async def _forward(self, message: StoryOf | ReportBlocks, reply: Reply, seconds: float) -> None:
        try:
            reply.send(await self._scheduler.ask(message, seconds))
        except KvyardError as error:
            reply.fail(error)
