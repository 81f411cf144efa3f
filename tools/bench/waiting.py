"""How much of its time the executor's thread has nothing to do although requests could run, under a closed load.

Read from the engine's own metrics every SAMPLE_S while `kvyard load` keeps it busy; only intervals with nearly all
requests in the running batch at both ends count. The share is of the time in which there was something to do: idle
although runnable, over that and the busy time.
"""

from __future__ import annotations

import itertools
import subprocess
import time
import urllib.request
from collections.abc import Sequence

import msgspec

from tools.bench.processes import KVYARD, running
from tools.bench.rows import Measured

SAMPLE_S = 0.5
NEARLY_ALL = 0.9  # of the requests
_RUNNING = "kvyard_requests_running"
_BUSY, _IDLE = "kvyard_executor_busy_seconds_total", 'kvyard_executor_idle_seconds_total{work="runnable"}'


class Sample(msgspec.Struct, frozen=True):
    running: float
    busy: float  # seconds so far
    idle: float  # seconds so far, although requests could have run


def sample_of(exposition: str) -> Sample:
    """Raises KeyError when the engine does not tell these."""
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines() if line and not line.startswith("#"))
    values = dict(lines)
    return Sample(*(float(values[name]) for name in (_RUNNING, _BUSY, _IDLE)))


def share(samples: Sequence[Sample], num_running: int) -> float:
    """Percent. Raises RuntimeError when nearly all never ran at once."""
    busy = idle = 0.0
    for before, after in itertools.pairwise(samples):
        if min(before.running, after.running) >= NEARLY_ALL * num_running:
            busy += after.busy - before.busy
            idle += after.idle - before.idle
    if not busy:
        raise RuntimeError(f"{num_running} requests never ran at once: {max((s.running for s in samples), default=0)}")
    return 100 * idle / (busy + idle)


def measure(rounds: int, num_running: int, input_len: int, output_len: int) -> Measured:
    with running("serve", "--role=both", f"--max-num-seqs={num_running}") as (url, _):
        return Measured(tuple(_round(url, num_running, input_len, output_len, seed) for seed in range(rounds)))


def _round(url: str, num_running: int, input_len: int, output_len: int, seed: int) -> float:
    load = {
        "concurrency": num_running,
        "requests": 2 * num_running,
        "warm-up": 0,
        "input-len": input_len,
        "output-len": output_len,
        "seed": seed,
    }
    command = [*KVYARD, "load", url, "--json", *(f"--{name}={value}" for name, value in load.items())]
    samples = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as client:
        while client.poll() is None:
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                samples.append(sample_of(answer.read().decode()))
            time.sleep(SAMPLE_S)
        assert client.stderr is not None
        # 3: the client could not keep up. What it reads late is no time of the executor's.
        if client.returncode not in (0, 3):
            raise RuntimeError(f"kvyard load ended with {client.returncode}: {client.stderr.read()[-500:]}")
    return share(samples, num_running)
