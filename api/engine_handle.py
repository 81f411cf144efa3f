"""What the endpoint needs of its engine, and nothing more: the engine process implements it, tests fake it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from actors.configuration import EngineConfiguration
from actors.kernel.address import Address
from actors.messages.admission import AbortRequest, ReportBlocks, ResponseClosed, StoryOf, SubmitRequest
from actors.messages.control import ControlMessage
from actors.messages.model import ModelDescription
from actors.messages.transfer import ReleaseTicket
from api.metrics import EngineMetrics

# SubmitRequest is answered with an OutputStream, StoryOf with RequestStory | None, ReportBlocks with BlocksReport; of
# control messages see actors/messages/control.py.
AdmissionMessage = (
    SubmitRequest | AbortRequest | ResponseClosed | ReleaseTicket | StoryOf | ReportBlocks | ControlMessage
)


class Health(msgspec.Struct, frozen=True):
    """healthy: the engine makes progress; ready: it takes requests now. `reason` says why not."""

    healthy: bool
    reason: str = ""
    ready: bool = True
    details: dict[str, Any] = {}


class EngineHandle(Protocol):
    @property
    def configuration(self) -> EngineConfiguration: ...
    @property
    def description(self) -> ModelDescription: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def capacity_blocks(self) -> int:
        """Usable blocks of the KV pool."""

    @property
    def engine_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def worker_pids(self) -> Sequence[int]: ...
    @property
    def transport(self) -> str:
        """ "nixl" or "tcp", what `auto` came to."""

    @property
    def admission(self) -> Address[AdmissionMessage]: ...
    @property
    def kv_secret(self) -> bytes | None: ...
    @property
    def metrics(self) -> EngineMetrics: ...
    def clock(self) -> float:
        """Seconds on the engine's monotonic clock."""

    def new_id(self) -> str:
        """Random hex digits."""

    def new_seed(self) -> int: ...
    def health(self) -> Health: ...
    def incompatible_peers(self) -> Mapping[str, str]:
        """engine id → the fields of its KV layout that differ from ours."""


def served_model(engine: EngineHandle) -> str:
    """The model id that clients use."""
    return engine.configuration.served_model_name or engine.description.default_id
