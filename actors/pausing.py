"""What an operator has asked of the scheduler and is not answered yet: a pause not reached, resets not made.

The SchedulerActor calls `receive` for each message, `before_planning` and `after_delivery` in each turn. Invariants: at
most one pause and MAX_FORCED_RESETS are open; a pause is answered after the outputs of what it ended; a forced reset is
made with no step in flight, so that no token is lost to it and no block of it is fenced.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.kernel.reply import Reply
from actors.messages.control import (
    ControlMessage,
    PauseMode,
    PauseReport,
    PauseScheduler,
    PrefixCacheReport,
    ResetPrefixCache,
    ResumeScheduler,
)
from actors.messages.errors import RefusalReason, RequestRefused
from actors.scheduling.core import SchedulerCore

MAX_FORCED_RESETS = 64  # that wait for the steps in flight


class _OpenPause(NamedTuple):
    mode: PauseMode
    aborted: int
    reply: Reply


class Pausing:
    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._open: _OpenPause | None = None
        self._forced_resets: list[Reply] = []

    def receive(self, message: ControlMessage, reply: Reply, now: float) -> None:
        match message:
            case PauseScheduler():
                self._pause(message.mode, reply, now)
            case ResumeScheduler():
                self._core.pause("none")
                self._supersede()
                reply.send(self._report(reached=True))
            case ResetPrefixCache(preempt_running=True) if len(self._forced_resets) == MAX_FORCED_RESETS:
                text = f"{MAX_FORCED_RESETS} resets wait already for the steps in flight: send it again later"
                reply.fail(RequestRefused(RefusalReason.QUEUE_FULL, text, retry_after=1))
            case ResetPrefixCache(preempt_running=True):
                self._forced_resets.append(reply)
            case ResetPrefixCache():
                self._reset(reply, now, preempt_running=False)

    @property
    def holds_plans(self) -> bool:
        """Steps in flight are to come back before the next one is planned."""
        return bool(self._forced_resets)

    @property
    def waits(self) -> bool:
        """Somebody waits for steps to come back."""
        return self._open is not None or bool(self._forced_resets)

    def before_planning(self, now: float, steps_in_flight: int) -> None:
        if not steps_in_flight:
            replies, self._forced_resets = self._forced_resets, []
            for reply in replies:
                self._reset(reply, now, preempt_running=True)

    def after_delivery(self, steps_in_flight: int) -> None:
        pause = self._open
        if pause is None or steps_in_flight or (pause.mode == "wait" and self._core.has_started()):
            return
        self._open = None
        pause.reply.send(self._report(reached=True, aborted=pause.aborted))

    def _pause(self, mode: PauseMode, reply: Reply, now: float) -> None:
        core = self._core
        core.pause("all" if mode == "keep" else "new")
        request_ids = core.live_request_ids() if mode == "abort" else []
        for request_id in request_ids:
            core.abort(request_id, now, "the engine was paused")
        self._supersede()
        self._open = _OpenPause(mode, len(request_ids), reply)

    def _supersede(self) -> None:
        pause, self._open = self._open, None
        if pause is not None:
            pause.reply.send(self._report(reached=False, aborted=pause.aborted))

    def _report(self, *, reached: bool, aborted: int = 0) -> PauseReport:
        stats = self._core.stats()
        return PauseReport(stats.paused, reached, aborted, stats.running, stats.waiting + stats.skipped)

    def _reset(self, reply: Reply, now: float, *, preempt_running: bool) -> None:
        done = self._core.reset_prefix_cache(now, preempt_running)
        blocks = self._core.blocks_report(now)
        reply.send(PrefixCacheReport(done, blocks.usable - blocks.free, blocks.grants))
