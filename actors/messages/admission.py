"""api ↔ AdmissionActor ↔ SchedulerActor."""

from __future__ import annotations

import msgspec

from actors.messages.request import EngineRequest, RequestOutput, StoryInterval


class SubmitRequest(msgspec.Struct, frozen=True, tag=True):
    """api → admission, an ask. Answered with an `OutputStream`, or fails with `RequestRefused`.

    `trace_id`: by which the client knows the request (X-Request-ID), the same at every engine that it comes to.
    """

    request: EngineRequest
    trace_id: str = ""


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """api → admission → scheduler. Unknown and finished ids are ignored. `reason` goes into the story."""

    request_id: str
    reason: str


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """admission → scheduler. `submitted`: when it came from the API (engine clock); `trace_id` as it came."""

    request: EngineRequest
    submitted: float = 0.0
    trace_id: str = ""


class PublishOutputs(msgspec.Struct, frozen=True, tag=True):
    """scheduler → admission, one per step or event that had any."""

    outputs: tuple[RequestOutput, ...]


class StoryOf(msgspec.Struct, frozen=True, tag=True):
    """api → admission → scheduler, an ask. Answered with `RequestStory` or None for an id that nobody knows."""

    request_id: str


class RequestStory(msgspec.Struct, frozen=True, tag=True):
    """The intervals follow each other without a gap: their lengths add up to the request's wall time."""

    request_id: str
    finished: bool
    intervals: tuple[StoryInterval, ...]


class ResponseClosed(msgspec.Struct, frozen=True, tag=True):
    """api → admission: the last byte of the answer is out (or the client is gone); ends the story."""

    request_id: str
    outcome: str  # "stop", "length", "abort", "error"


class ReportBlocks(msgspec.Struct, frozen=True, tag=True):
    """An ask of the scheduler. Answered with `BlocksReport`."""


class GrantReport(msgspec.Struct, frozen=True):
    request_id: str
    generation: int
    state: str  # "held" | "fenced" | "leased" | "quarantined"
    blocks: int
    age_s: float
    reason: str


class BlocksReport(msgspec.Struct, frozen=True, tag=True):
    """`/debug/blocks`. usable = free + held + fenced + leased + quarantined."""

    usable: int
    free: int
    held: int
    fenced: int
    leased: int
    quarantined: int
    grants: tuple[GrantReport, ...]


class Tick(msgspec.Struct, frozen=True, tag=True):
    """A timer of the actor itself: something it waits for may be due."""
