"""What an engine says of itself at `GET /debug/engine`, and what the router passes on of it."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.configuration import Role


class EngineReport(msgspec.Struct, frozen=True):
    """Fields that a newer engine adds are ignored, so that the two can be updated one after the other."""

    engine_id: str
    role: Role
    epoch: int
    healthy: bool
    reason: str | None = None
    pid: int | None = None
    worker_pids: tuple[int, ...] = ()
    model: str | None = None
    kv_layout: dict[str, Any] | None = None
    transport: str | None = None
    paused: str = "none"  # "new": nobody is admitted, "all": nothing is scheduled
    incompatible_peers: dict[str, str] = {}  # engine_id → both values of what differs
    max_model_len: int | None = None


class EngineListing(msgspec.Struct, frozen=True):
    """One element of the router's `/debug/engines`."""

    engine_id: str
    role: str
    url: str
    pid: int | None
    worker_pids: tuple[int, ...]
    epoch: int | None
    healthy: bool
    reason: str
    paused: str
