"""What the actors tell of themselves to whoever measures: handed in, so that no actor reaches for a metrics library."""

from __future__ import annotations

from typing import Protocol

from actors.messages.stats import EngineStats


class Observer(Protocol):
    def stats_changed(self, stats: EngineStats) -> None: ...
    def step_completed(self, num_tokens: int, num_requests: int, seconds: float) -> None: ...
    def executor_worked(self, busy: float, idle: float, idle_although_runnable: float) -> None:
        """Seconds of one step and of the wait before it; the second kind of waiting is part of the first."""

    def load_ended(self, outcome: str, seconds: float, num_bytes: int) -> None:
        """outcome: "landed" | "failed" | "recomputed"."""

    def step_log_failed(self) -> None:
        """The engine goes on without its step log."""

    def blocks_sent(self, num_bytes: int) -> None: ...
    def lease_expired(self) -> None: ...
    def peer_lost(self, engine_id: str) -> None: ...
    def load_refused_by_layout(self, peer_engine_id: str, detail: str) -> None:
        """The peer's KV layout differs: the router must stop pairing the two."""
