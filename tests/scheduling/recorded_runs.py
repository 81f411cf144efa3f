"""Runs of a core that records, and their replay; the records go through their encoding first, as in a file."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan
from actors.messages.transfer import BlocksQuiet, LoadBlocks, TransferFailed
from actors.scheduling.core import SchedulerCore
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import (
    Header,
    PrefixCacheReset,
    Record,
)
from actors.scheduling.replay import Replay
from actors.step_log.writer import StepLog
from tests.scheduling.builders import request_of, result_of, ticket_of


def header_of(config: SchedulerConfiguration) -> Header:
    return Header("both-0", 1, "both", config, 1, "0.1.0", "3.11", "0", 1.7e9, 0.0)


def as_read(records: list[Record]) -> list[Record]:
    data = msgspec.msgpack.encode(records)
    return msgspec.msgpack.decode(data, type=list[Record])


def replayed(config: SchedulerConfiguration, records: list[Record], connector: Any = None) -> Replay:
    (header,) = as_read([header_of(config)])
    assert isinstance(header, Header)
    run = Replay(header, connector)
    for record in as_read(records):
        run.take(record)
    return run


def must_be_equal(core: SchedulerCore, other: SchedulerCore, now: float) -> None:
    assert other.stats() == core.stats()
    assert other.blocks_report(now) == core.blocks_report(now)
    for name in ("running", "waiting", "skipped_waiting"):
        assert [repr(request) for request in getattr(other, name)] == [repr(one) for one in getattr(core, name)]


SMALL = SchedulerConfiguration(
    usable_blocks=8, block_size=4, kv_connector=True, kv_load_failure_policy="recompute", prefix_caching=True
)


def a_log(config: SchedulerConfiguration) -> list[Record]:
    """Five requests in a pool for three; a load that fails, a preemption, an abort, a reset."""
    records: list[Record] = []
    core = RecordedCore(config, records.append)
    core.add(request_of("remote", 8, ticket=ticket_of(8), max_tokens=6), 0.5)
    for number in range(4):
        core.add(request_of(f"r{number}", 7 + number, first=100 * number, max_tokens=12), 0.5)
    for step in range(40):
        now = 1.0 + step
        plan = core.schedule(now)
        for effect in core.take_effects():
            if isinstance(effect, LoadBlocks):
                core.apply(TransferFailed(effect.request_id, effect.generation, "checksum", "block 1"), now)
        if plan.request_ids:
            core.apply(result_of(plan, token=step), now)
        if step == 9:
            core.abort("r0", now, "the client left")
        if step == 12:
            core.reset_prefix_cache(now, preempt_running=True)
    assert core.stats().preemptions_total > 0
    assert any(isinstance(record, PrefixCacheReset) for record in records)
    return records


def random_run(path: Path, seed: int) -> int:
    """The state machine without hypothesis, for a log with everything in it. Answers its number of plans."""
    rng = random.Random(seed)
    config = SchedulerConfiguration(
        usable_blocks=24,
        block_size=2,
        policy="priority",
        max_num_batched_tokens=32,
        max_model_len=60,
        max_num_seqs=6,
        prefix_caching=True,
        async_scheduling=True,
        kv_connector=True,
        fence_frees=True,
        kv_load_failure_policy="recompute",
        max_loras=2,
    )
    step_log = StepLog.open(str(path), header_of(config))
    core = RecordedCore(config, step_log.write)
    plans: deque[StepPlan] = deque()
    num_plans = 0
    for turn in range(1500):
        now = float(turn)
        if rng.random() < 0.3:
            core.add(
                request_of(
                    f"request-{turn}",
                    rng.randint(1, 20),
                    first=100 * rng.randrange(3),
                    max_tokens=rng.randint(1, 12),
                    priority=rng.randrange(3),
                    arrival=now,
                    deadline=now + rng.choice([20.0, 500.0]),
                    lora=rng.choice([None, "one", "two", "three"]),
                    ticket=rng.choice([None, ticket_of(9)]),
                ),
                now,
            )
        if rng.random() < 0.05 and core.live_request_ids():
            core.abort(rng.choice(core.live_request_ids()), now)
        if len(plans) < 2 and core.has_runnable():
            plan = core.schedule(now)
            num_plans += 1
            if plan.request_ids:
                plans.append(plan)
        elif plans:
            core.apply(result_of(plans.popleft(), rng.randrange(300)), now)
        core.expire(now)
        for effect in core.take_effects():
            if isinstance(effect, LoadBlocks):
                late = rng.random() < 0.5
                failed = TransferFailed(effect.request_id, effect.generation, "deadline", quarantined=late)
                core.apply(failed, now)
                if late:
                    core.apply(BlocksQuiet(effect.request_id, effect.generation), now)
    assert core.stats().preemptions_total > 20
    step_log.close()
    return num_plans
