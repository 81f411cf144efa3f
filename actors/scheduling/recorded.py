"""A SchedulerCore that says what it was told and what it planned: the source of the step log.

Every input is written before the core takes it, so that one which makes the core raise is the last of the log.
Invariant: the records, given to a fresh core in their order (replay.py), bring it into the state of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, RequestOutput
from actors.messages.transfer import TransferOrder, TransferReport
from actors.scheduling.connector import Connector
from actors.scheduling.core import SchedulerCore
from actors.scheduling.records import (
    Aborted,
    Added,
    DraftsSet,
    EffectsTaken,
    Expired,
    GrammarReady,
    PauseSet,
    PlanFailed,
    Planned,
    PrefixCacheReset,
    Record,
    ReportApplied,
    StepApplied,
)
from actors.scheduling.request import NO_EXTRAS, RequestExtras
from actors.scheduling.step import BadBlocks


class RecordedCore(SchedulerCore):
    def __init__(
        self, config: SchedulerConfiguration, write: Callable[[Record], None], connector: Connector | None = None
    ) -> None:
        """A replay makes its own connector: one handed in here must answer as the configuration's would."""
        super().__init__(config, connector)
        self._write = write

    def add(self, request: EngineRequest, now: float, extras: RequestExtras = NO_EXTRAS) -> None:
        self._write(Added(now, request, extras))
        super().add(request, now, extras)

    def abort(self, request_id: str, now: float, reason: str = "") -> None:
        self._write(Aborted(now, request_id, reason))
        super().abort(request_id, now, reason)

    def expire(self, now: float) -> None:
        deadline = self.next_deadline()
        if deadline is not None and deadline <= now:
            self._write(Expired(now))
        super().expire(now)

    def apply(self, message: StepResult | TransferReport, now: float) -> None:
        if not isinstance(message, StepResult):
            self._write(ReportApplied(now, message))
        super().apply(message, now)  # a StepResult comes back through apply_step

    def apply_step(self, result: StepResult | None, bad_blocks: BadBlocks, now: float) -> None:
        bad = {request_id: list(indexes) for request_id, indexes in bad_blocks.items()}
        self._write(StepApplied(now, result, bad))
        super().apply_step(result, bad_blocks, now)

    def set_drafts(self, request_id: str, tokens: list[int]) -> None:
        self._write(DraftsSet(request_id, tokens))
        super().set_drafts(request_id, tokens)

    def grammar_ready(self, request_id: str) -> None:
        self._write(GrammarReady(request_id))
        super().grammar_ready(request_id)

    def pause(self, mode: Literal["none", "new", "all"]) -> None:
        self._write(PauseSet(mode))
        super().pause(mode)

    def reset_prefix_cache(self, now: float, preempt_running: bool = False) -> bool:
        self._write(PrefixCacheReset(now, preempt_running))
        return super().reset_prefix_cache(now, preempt_running)

    def schedule(self, now: float) -> StepPlan:
        try:
            plan = super().schedule(now)
        except Exception as error:
            self._write(PlanFailed(now, f"{type(error).__name__}: {error}"))
            raise
        self._write(Planned(now, plan))
        return plan

    def take_effects(self) -> list[RequestOutput | TransferOrder]:
        effects = super().take_effects()
        if effects:
            self._write(EffectsTaken())
        return effects
