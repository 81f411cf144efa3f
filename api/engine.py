"""What the HTTP handlers know of their engine: implements `api.engine_handle.EngineHandle`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping

from actors.admission import AdmissionMessage
from actors.configuration import EngineConfiguration
from actors.health import Watchdog
from actors.kernel.address import Address
from actors.messages.model import ModelDescription
from api.engine_handle import Health
from api.metrics import EngineMetrics


class Engine:
    admission: Address[AdmissionMessage]

    def __init__(
        self,
        configuration: EngineConfiguration,
        description: ModelDescription,
        max_model_len: int,
        capacity_blocks: int,
        kv_secret: bytes | None,
        watchdog: Watchdog,
        silences: Callable[[], dict[str, float]],
    ) -> None:
        """`silences`: actor name → seconds since it last answered a ping."""
        assert configuration.engine_id is not None
        self.configuration, self.description = configuration, description
        self.max_model_len, self.capacity_blocks = max_model_len, capacity_blocks
        self.engine_id, self.epoch = configuration.engine_id, configuration.epoch
        self.kv_secret = kv_secret
        self.metrics = EngineMetrics(self.engine_id)
        self.worker_pids: list[int] = []
        self.transport: str = configuration.transport
        self.ready = False
        self._watchdog, self._silences = watchdog, silences

    def clock(self) -> float:
        return time.monotonic()

    def new_id(self) -> str:
        return secrets.token_hex(12)

    def new_seed(self) -> int:
        return secrets.randbits(63)

    def health(self) -> Health:
        verdict = self._watchdog.verdict(self._silences(), self.clock())
        return Health(verdict.healthy, verdict.reason, self.ready and verdict.healthy)

    def incompatible_peers(self) -> Mapping[str, str]:
        return self.metrics.incompatible_peers
