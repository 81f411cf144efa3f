"""How long an engine takes from its start to the 200 of `/ready`, with model, kernels and files in the caches."""

from __future__ import annotations

import time

from tools.bench.processes import running
from tools.bench.rows import Measured


def measure(rounds: int) -> Measured:
    return Measured(tuple(_start() for _ in range(rounds + 1))[1:])  # the first fills the caches


def _start() -> float:
    started = time.monotonic()
    with running("serve", "--role=both", poll_s=0.02):
        return time.monotonic() - started
