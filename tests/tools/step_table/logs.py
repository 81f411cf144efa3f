"""Step logs for the tests, and `kvyard steps` as a user runs it on them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepResult
from actors.messages.transfer import BlocksLanded, LoadBlocks
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Record, RequestNote, StepNote
from actors.step_log.writer import StepLog
from tests.scheduling.builders import request_of, result_of, ticket_of
from tests.scheduling.recorded_runs import header_of
from tools.steps import steps

CONFIG = SchedulerConfiguration(usable_blocks=6, block_size=4, kv_connector=True, prefix_caching=True)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(steps, arguments)
    return result.exit_code, result.stdout, result.stderr


def write(path: Path, records: list[Record], config: SchedulerConfiguration = CONFIG, *, whole: bool = True) -> Path:
    step_log = StepLog.open(str(path), header_of(config))
    for record in records:
        step_log.write(record)
        step_log.flush()
    if whole:
        step_log.close()
    return path


def with_stages(result: StepResult) -> StepResult:
    """A result that took 6 ms to compute and 1 ms to sample."""
    return msgspec.structs.replace(result, execute_s=0.006, sample_s=0.001)


def two_requests() -> list[Record]:
    """`first` computes 9 tokens in 3 of 6 blocks and generates 3; `second` loads 8 of its 9 and needs 3 blocks, too.

    Each step: planned at its second, 1 ms to plan, dispatched, 10 ms until it returns, 2 ms until published.
    """
    records: list[Record] = []
    core = RecordedCore(CONFIG, records.append)
    records.append(RequestNote("first", 0.25))
    core.add(request_of("first", 9, max_tokens=3, arrival=0.125), 0.5)
    records.append(RequestNote("second", 0.625))
    core.add(request_of("second", 9, first=100, max_tokens=2, arrival=0.5, ticket=ticket_of(8, 100)), 0.75)

    def step(now: float) -> None:
        plan = core.schedule(now)
        orders = [effect for effect in core.take_effects() if isinstance(effect, LoadBlocks)]
        if plan.request_ids:
            core.apply(with_stages(result_of(plan)), now + 0.011)
            core.take_effects()
            records.append(StepNote(plan.step, 0.001, now + 0.001, now + 0.011, now + 0.013))
        for order in orders:
            core.apply(BlocksLanded(order.request_id, order.generation, 4096, 0.25), now + 0.5)

    for now in (1.0, 2.0, 3.0, 4.0):
        step(now)
    assert core.live_request_ids() == []
    return records


def normal(line: str) -> str:
    return " ".join(line.split())
