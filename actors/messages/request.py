"""A request as the engine sees it: tokens, limits, and how its KV blocks come or go."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from actors.messages.lease import Ticket


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn. temperature 0 is greedy; top_k -1 is off; seed None is drawn per request."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """Crosses api → AdmissionActor → SchedulerActor. Times are seconds on the engine process's monotonic clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()  # empty: ignore_eos
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is sooner
    arrival: float = 0.0
    deadline: float = float("inf")
    lora: str | None = None
    cache_salt: str | None = None
    skip_prefix_cache: bool = False
    do_remote_decode: bool = False  # prefill side: keep the blocks under a lease and answer with a ticket
    ticket: Ticket | None = None  # decode side: where the prompt's blocks lie


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step (or one event) did to one request. `finish_reason` ends it; `error` says why it is ERROR."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None  # a RefusalReason value
    error_text: str | None = None
    ticket: Ticket | None = None  # prefill side, with the finish
    num_cached_tokens: int = 0  # of the prompt, from the local prefix cache and from remote; set with the first token
    story: tuple[StoryInterval, ...] = ()  # with the finish: the scheduler's part of the request's life


class StoryInterval(msgspec.Struct, frozen=True):
    """One reason why a request waited or worked, from `start` to `end` (engine clock, seconds; end None: still)."""

    reason: str
    start: float
    end: float | None
    detail: str = ""
