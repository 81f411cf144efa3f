"""A decode step of 16 over the time of its weight products and one read of its KV: both of one run of step_profile."""

from __future__ import annotations

import statistics
import subprocess
import sys

import msgspec

from tools.bench.rows import Measured

SHAPE = "decode-16"


class Times(msgspec.Struct, frozen=True):
    """Of `step_profile --json`: seconds, one value per turn."""

    steps: list[float]
    products: list[float]
    reads: list[float]

    def milliseconds(self) -> tuple[float, float]:
        """The step and its limit, medians; the limit is the sum of each turn's two parts."""
        limits = [product + read for product, read in zip(self.products, self.reads, strict=True)]
        return statistics.median(self.steps) * 1e3, statistics.median(limits) * 1e3


def measure(rounds: int) -> Measured:
    steps, limits = zip(*(_run().milliseconds() for _ in range(rounds)), strict=True)
    return Measured(steps, limits)


def _run() -> Times:
    """A process of its own: nothing of torch stays behind to disturb what is measured next."""
    command = [sys.executable, "-P", "-m", "tools.bench.step_profile", "--only", SHAPE, "--rounds=15", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"step_profile ended with {result.returncode}: {result.stderr[-2000:]}")
    return msgspec.json.decode(result.stdout, type=Times)
