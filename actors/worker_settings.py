"""What the engine process and its worker must agree on before their socket carries the first message."""

from __future__ import annotations

import msgspec

from actors.configuration import KVDType, Transport
from actors.messages.model import ModelDescription

EXECUTOR_WINDOW = 16  # plans
TRANSFER_WINDOW = 4096  # orders
SCHEDULER_WINDOW = 4096  # results and reports
EXIT_CONFIGURATION = 2
EXIT_FAILED = 70


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the worker needs; the engine process decides it."""

    description: ModelDescription
    engine_id: str
    epoch: int
    device: str
    dtype: str
    kv_dtype: KVDType
    num_blocks: int  # the null block included
    block_size: int
    threads: int
    kv_host: str
    transport: Transport
    lease_s: float
    renewal_s: float
    weights: str = "dense"
    fault: str | None = None
