"""Supervisor ↔ every actor, and engine process ↔ worker process."""

from __future__ import annotations

import msgspec


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by the kernel, in turn with the actor's other messages, with `Pong`."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    handled: int  # messages since the actor started


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """worker → engine, once: weights are loaded, the KV pool is there, the control listener is bound."""

    pid: int
    control_port: int  # of the TransferActor's TCP listener
    transport: str  # "nixl" | "tcp", what `auto` came to
    seconds_per_token: float = 0.0  # of the warm-up's prefill


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what you have and end, within `seconds`."""

    seconds: float
