"""Small logs for the tests of the file and of its reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepResult
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Header, Record, RequestNote, StepNote
from actors.step_log.reader import read
from actors.step_log.writer import StepLog
from tests.scheduling.builders import request_of, result_of

CONFIGURATION = SchedulerConfiguration(usable_blocks=9, block_size=4, kv_connector=True, async_scheduling=True)


def header_of(**fields: Any) -> Header:
    values: dict[str, Any] = {
        "engine_id": "decode-0",
        "epoch": 7,
        "role": "decode",
        "configuration": CONFIGURATION,
        "async_depth": 1,
        "kvyard_version": "0.1.0",
        "python_version": "3.11.9",
        "hash_seed": "0",
        "started_unix": 1.7e9,
        "started": 100.0,
    }
    return Header(**{**values, **fields})


def write_run(step_log: StepLog, steps: int = 6) -> list[Record]:
    """A run of three requests in a pool that preempts; flushed after each step. Answers what was written."""
    written: list[Record] = []

    def write(record: Record) -> None:
        written.append(record)
        step_log.write(record)

    core = RecordedCore(CONFIGURATION, write)
    for number in range(3):
        write(RequestNote(f"r{number}", 100.0))
        core.add(request_of(f"r{number}", 10, max_tokens=9, deadline=200.0 + number), 100.5)
    results: list[StepResult] = []
    for step in range(steps):
        now = 101.0 + step
        for result in results:
            core.apply(result, now)
        plan = core.schedule(now)
        results = [result_of(plan)] if plan.request_ids else []
        core.take_effects()
        write(StepNote(plan.step, 0.001, now, now + 0.5, now + 0.6))
        step_log.flush()
    return written


def run_at(path: Path, steps: int = 6, **fields: Any) -> list[Record]:
    """The records of a closed log, the header first."""
    step_log = StepLog.open(str(path), header_of(**fields))
    written = write_run(step_log, steps)
    step_log.close()
    return [header_of(**fields), *written]


def records_of(path: Path) -> list[Record]:
    return list(read(path))
