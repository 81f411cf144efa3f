"""What an operator asks of a running engine: api → AdmissionActor → SchedulerActor, all of them asks."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.messages.admission import GrantReport

PauseMode = Literal["abort", "wait", "keep"]


class PauseScheduler(msgspec.Struct, frozen=True, tag=True):
    """Answered with `PauseReport` once the pause is reached; newcomers queue until `ResumeScheduler`.

    abort: every live request ends with "abort", then nobody is admitted. Reached when no step is in flight.
    wait: nobody is admitted, what has begun to run goes on to its end, also if it is preempted meanwhile. Reached when
    all that has ended and no step is in flight.
    keep: nothing is scheduled, requests keep their blocks. Reached when no step is in flight.
    A later pause or a resume takes the place of one that is not reached yet, which is then answered as it stands.
    """

    mode: PauseMode


class ResumeScheduler(msgspec.Struct, frozen=True, tag=True):
    """Answered with `PauseReport`. Harmless when nothing is paused."""


class PauseReport(msgspec.Struct, frozen=True, tag=True):
    paused: Literal["none", "new", "all"]  # the core's state: "new" is nobody admitted, "all" nothing scheduled
    reached: bool  # whether what was asked is so; False when another message took its place
    aborted: int  # requests that this message ended
    running: int
    waiting: int  # both queues


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Answered with `PrefixCacheReport`. `preempt_running`: what runs gives its blocks back first and recomputes."""

    preempt_running: bool = False


class PrefixCacheReport(msgspec.Struct, frozen=True, tag=True):
    """`done` False: blocks are held (by running or parked requests, leases, quarantine), and nothing was forgotten."""

    done: bool
    blocks_held: int  # usable blocks that are not free
    grants: tuple[GrantReport, ...] = ()  # who holds them


ControlMessage = PauseScheduler | ResumeScheduler | ResetPrefixCache
