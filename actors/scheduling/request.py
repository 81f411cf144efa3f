"""One request inside the scheduler: what it knows, how far it is computed, which blocks it holds, where it stands.

    prompt tokens | output tokens | drafts                    <- tokens (known) and drafts
    ------- computed ------->|                                <- num_computed_tokens, advanced when a step is planned

Scheduling is this one rule: `num_computed_tokens` catches up with the known tokens, the drafts and the placeholders.
Invariant: a request that is not in a queue of its status is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec

from actors.messages.lease import Ticket
from actors.messages.request import EngineRequest
from actors.scheduling.grants import Grant
from actors.scheduling.story import Story


class Status(IntEnum):
    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5


class LoadPhase(Enum):
    NONE = "none"
    IN_FLIGHT = "in flight"  # the blocks are the transfer's; they may not be freed
    REPORTED = "reported"  # landed or failed; promoted by the next schedule()


class EncoderInput(msgspec.Struct, frozen=True):
    """`length` prompt positions from `offset` on are outputs of an encoder; equal hashes share one encoder run."""

    hash: str
    offset: int
    length: int


class InFlightTokens(NamedTuple):
    """What one step in flight will bring a request: one token, and as many more as its drafts are accepted."""

    step: int
    num_sampled: int  # at most, drafts included


class RequestExtras(msgspec.Struct, frozen=True):
    """What the core can schedule already and `EngineRequest` does not carry yet."""

    encoder_inputs: tuple[EncoderInput, ...] = ()
    needs_grammar: bool = False
    prompt_logprobs: bool = False  # wanted for the whole prompt, so the whole prompt is computed


NO_EXTRAS = RequestExtras()


class SchedulerRequest:
    __slots__ = (
        "block_extra",
        "cache_parent",
        "drafts",
        "encoder_inputs",
        "engine_request",
        "epoch",
        "grammar_ready",
        "grant",
        "in_flight",
        "is_prefill_chunk",
        "known_to_worker",
        "last_step",
        "load_failed",
        "load_phase",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "order",
        "reads_prefix_cache",
        "request_id",
        "reserves_rest",
        "starved",
        "status",
        "stop_ids",
        "story",
        "story_says_prefill",
        "ticket",
        "tokens",
    )

    def __init__(self, request: EngineRequest, extras: RequestExtras, now: float) -> None:
        self.engine_request = request
        self.request_id = request.request_id
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.min_tokens, self.max_tokens = request.min_tokens, request.max_tokens
        self.stop_ids = frozenset(request.eos_token_ids + request.stop_token_ids)
        self.order = (request.priority, request.arrival, request.request_id)
        self.encoder_inputs = extras.encoder_inputs
        self.grammar_ready = not extras.needs_grammar
        self.status = Status.WAITING_FOR_GRAMMAR if extras.needs_grammar else Status.WAITING
        self.num_computed_tokens = 0
        # Empty ones are the one shared empty tuple: a decoding request then touches less memory per step.
        self.drafts: Sequence[int] = ()
        # Async scheduling: oldest first, those of the current epoch. What was planned in an older one comes to nothing.
        self.in_flight: tuple[InFlightTokens, ...] = ()
        self.epoch = 0
        self.is_prefill_chunk = False  # the last planned step leaves some of its known tokens uncomputed
        self.reserves_rest = False  # admitted, prefill unfinished: loads leave room for the rest of it
        self.num_preemptions = 0
        self.starved = False  # preempted for its own sake while nobody else ran: others hold what it needs
        self.last_step = 0  # newest planned step that it is in
        self.known_to_worker = False
        self.grant: Grant | None = None
        self.num_registered = 0  # leading blocks that the prefix cache knows
        self.cache_parent = 0  # prefix-cache entry of the last of them
        self.block_extra = bool(request.lora is not None or request.cache_salt is not None or extras.encoder_inputs)
        self.reads_prefix_cache = not (request.skip_prefix_cache or extras.prompt_logprobs)
        self.num_cached_tokens = 0
        self.ticket: Ticket | None = request.ticket  # until the release obligation is discharged or handed over
        self.load_phase = LoadPhase.NONE
        self.load_failed = False
        self.story_says_prefill = False  # since its last admission no token has come
        self.story = Story("waiting_for_grammar" if extras.needs_grammar else "queued", min(request.arrival, now))

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_placeholders(self) -> int:
        """Async scheduling: tokens that steps in flight sample, drafts included; counted as if they were known."""
        in_flight = self.in_flight
        if not in_flight:
            return 0
        return in_flight[0].num_sampled if len(in_flight) == 1 else sum(part.num_sampled for part in in_flight)

    def begin_epoch(self) -> None:
        """The KV that its steps in flight computed from, or wrote, is not to be relied on: their tokens are void."""
        self.epoch += 1
        self.in_flight = ()

    @property
    def block_ids(self) -> list[int]:
        return [] if self.grant is None else self.grant.block_ids

    def forget_blocks(self) -> None:
        """After its grant is gone: nothing is computed, nothing registered."""
        self.grant = None
        self.num_computed_tokens = 0
        self.num_registered = 0
        self.cache_parent = 0

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.status.name} computed {self.num_computed_tokens} of {len(self.tokens)}"
            f" blocks {self.block_ids}>"
        )
