"""`python -m tools.bench.step_log`: what --step-log costs the engine's loop, per decode step.

Two cores get the same requests, results and times, one of them with a log on disk; what the SchedulerActor does around
a step is done for both, in turns, and the medians are compared. There is no model: the share is of a step as measured.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import uuid
from array import array
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest
from actors.scheduling.core import SchedulerCore
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Header, RequestNote, StepNote
from actors.step_log.writer import NO_STEP_LOG, RecordSink, StepLog

STEP_S = {16: 0.013, 128: 0.077}  # of SmolLM2-135M on two cores, with that many rows
PROMPT, OUTPUT = 256, 128  # tokens
VOCABULARY = 49_152
CONFIGURATION = SchedulerConfiguration(
    usable_blocks=8_000,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    prefix_caching=True,
    async_scheduling=True,
    kv_connector=True,
    fence_frees=True,
)


class Loop:
    """The SchedulerActor's turns without the actor: one per step, with `rows` requests always live."""

    def __init__(self, core: SchedulerCore, step_log: RecordSink, rows: int) -> None:
        self.core, self.step_log, self.rows = core, step_log, rows
        self.random = random.Random(rows)
        self.plan: StepPlan | None = None
        self.now = 0.0

    def add_missing(self) -> None:
        while len(self.core.live_request_ids()) < self.rows:
            request_id = f"cmpl-{uuid.UUID(int=self.random.getrandbits(128)).hex}"
            prompt = tuple(self.random.choices(range(VOCABULARY), k=PROMPT))
            self.step_log.write(RequestNote(request_id, self.now))
            self.core.add(EngineRequest(request_id, prompt, max_tokens=OUTPUT, arrival=self.now), self.now)

    def turn(self, result: StepResult | None) -> None:
        if result is not None:
            self.core.apply(result, self.now)
        self.core.expire(self.now)
        self.plan = self.core.schedule(self.now)
        self.core.take_effects()
        self.step_log.write(StepNote(self.plan.step, 0.0001, self.now, self.now + 0.01, self.now + 0.011))
        self.step_log.flush()

    def step(self) -> tuple[float, bool]:
        """Seconds of one turn, and whether it was decode only."""
        self.now += 0.01
        result = None if self.plan is None else self._sampled(self.plan)
        decodes = len(self.core.live_request_ids()) == self.rows
        self.add_missing()
        start = time.perf_counter()
        self.turn(result)
        taken = time.perf_counter() - start
        assert self.plan is not None
        return taken, decodes and not self.plan.new_requests and len(self.plan.request_ids) == self.rows

    def _sampled(self, plan: StepPlan) -> StepResult:
        num = sum(memoryview(plan.num_sampled).cast("i"))
        tokens = array("i", self.random.choices(range(VOCABULARY), k=num))
        return StepResult(plan.step, plan.num_sampled, tokens.tobytes(), 0.0123, 0.0004)


def measure(rows: int, steps: int, folder: Path) -> tuple[float, float, float, float]:
    """Medians in seconds: a turn without and with the log; its own cost per turn; bytes of file per step."""
    path = folder / f"{rows}.steplog"
    header = Header("bench", 1, "both", CONFIGURATION, 1, "", "", "", 0.0, 0.0)
    step_log = StepLog.open(str(path), header)
    plain = Loop(SchedulerCore(CONFIGURATION), NO_STEP_LOG, rows)
    logged = Loop(RecordedCore(CONFIGURATION, step_log.write), step_log, rows)
    without: list[float] = []
    with_log: list[float] = []
    for _ in range(steps):
        (one, decodes), (other, _) = plain.step(), logged.step()
        if decodes:
            without.append(one)
            with_log.append(other)
    step_log.close()
    own = statistics.median(other - one for one, other in zip(without, with_log, strict=True))
    return statistics.median(without), statistics.median(with_log), own, path.stat().st_size / steps


@click.command()
@click.option("--steps", default=1500, show_default=True)
def main(steps: int) -> None:
    """Cost of the step log per decode step, at 16 and at 128 rows."""
    table = Table(title=f"step log, per step; {steps} steps, {PROMPT} tokens in, {OUTPUT} out")
    for column in ("rows", "step", "turn, µs", "with log, µs", "the log, µs", "of the step", "file, bytes"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for rows, step_s in STEP_S.items():
            without, with_log, own, size = measure(rows, steps, Path(folder))
            microseconds = [f"{seconds * 1e6:.0f}" for seconds in (without, with_log, own)]
            table.add_row(f"{rows}", f"{step_s * 1e3:.0f} ms", *microseconds, f"{own / step_s:.2%}", f"{size:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
