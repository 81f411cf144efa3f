"""The step log's records: every input of the core, every plan that came of it, and what was measured beside it.

Inputs and plans are replayed; notes (`RequestNote`, `StepNote`) are only shown. The order of the records is the order
in which the core was called. Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import msgspec

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest
from actors.messages.transfer import TransferReport
from actors.scheduling.request import NO_EXTRAS, RequestExtras

FORMAT_VERSION = 1


class Header(msgspec.Struct, frozen=True, array_like=True, tag="header"):
    """First record. Whatever might make a replay differ stands here."""

    engine_id: str
    epoch: int
    role: str
    configuration: SchedulerConfiguration
    async_depth: int
    kvyard_version: str
    python_version: str
    hash_seed: str  # PYTHONHASHSEED, "" when it was random
    started_unix: float  # wall clock, seconds
    started: float  # the same moment on the engine's clock
    format_version: int = FORMAT_VERSION


class Added(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    now: float
    request: EngineRequest
    extras: RequestExtras = NO_EXTRAS


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    now: float
    request_id: str
    reason: str


class Expired(msgspec.Struct, frozen=True, array_like=True, tag="expire"):
    """Only when a deadline had passed."""

    now: float


class ReportApplied(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    now: float
    report: TransferReport


class StepApplied(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """`result` None: a step without rows came back."""

    now: float
    result: StepResult | None
    bad_blocks: dict[str, list[int]] = {}


class DraftsSet(msgspec.Struct, frozen=True, array_like=True, tag="drafts"):
    request_id: str
    tokens: list[int]


class GrammarReady(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    request_id: str


class PauseSet(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    mode: str  # "none" | "new" | "all"


class PrefixCacheReset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    now: float
    preempt_running: bool


class EffectsTaken(msgspec.Struct, frozen=True, array_like=True, tag="effects"):
    """The effects so far are out of the core's hands: an abort can no longer withdraw a ticket among them."""


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """`schedule(now)` answered this. A plan without rows changed the core, too, if it preempted or admitted loads."""

    now: float
    plan: StepPlan


class PlanFailed(msgspec.Struct, frozen=True, array_like=True, tag="plan failed"):
    """`schedule(now)` raised; the engine ended with it, and this is the log's last record of the core."""

    now: float
    error: str


class RequestNote(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """From the request's `arrival` to `submitted` it was the API's, from there to its `Added` the AdmissionActor's.

    `trace_id` is its X-Request-ID, which its client and the other engines know, too; "": an older log, or no HTTP.
    """

    request_id: str
    submitted: float
    trace_id: str = ""


class StepNote(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Written when the step's outputs are handed on. `execute_s` and `sample_s` stand in the StepResult."""

    step: int
    schedule_s: float  # duration of schedule()
    dispatched: float
    returned: float  # the result was taken out of the mailbox
    published: float  # its outputs were handed to the AdmissionActor


Input = (
    Added
    | Aborted
    | Expired
    | ReportApplied
    | StepApplied
    | DraftsSet
    | GrammarReady
    | PauseSet
    | PrefixCacheReset
    | EffectsTaken
)
Record = Header | Input | Planned | PlanFailed | RequestNote | StepNote
