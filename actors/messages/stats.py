"""What an engine counts, as plain values."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and running totals after a step or event."""

    running: int = 0
    waiting: int = 0
    skipped: int = 0
    blocks_free: int = 0
    blocks_held: int = 0
    blocks_fenced: int = 0
    blocks_leased: int = 0
    blocks_quarantined: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    late_events_total: int = 0
    paused: Literal["none", "new", "all"] = "none"  # "new": nobody is admitted, "all": nothing is scheduled
    steps_in_flight: int = 0  # which a pause or a forced reset waits for; 0 when neither does
