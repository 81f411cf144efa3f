"""What does not replay to the byte is named: the first field and row of a plan, the input at which the core raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actors.messages.plan import StepPlan
from actors.scheduling.orders import int32
from actors.scheduling.records import (
    Aborted,
    Planned,
    StepApplied,
)
from actors.scheduling.replay import PlanDiffers
from tests.scheduling.recorded_runs import SMALL, a_log, replayed
from tests.scheduling.simulated import ints


def first(value: int) -> Callable[[bytes], bytes]:
    """Changes the first row of a column."""
    return lambda column: int32([value, *ints(column)[1:]])


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("step", lambda step: step + 1, "recorded as step 3, replayed as step 2"),
        ("request_ids", lambda ids: ("x", *ids[1:]), "request_ids, row 0: recorded x, replayed r"),
        ("request_ids", lambda ids: ids[:-1], "request_ids, row 2: remote is only replayed"),
        ("num_scheduled_tokens", first(9), r"num_scheduled_tokens, row 0 \(r.+\): recorded 9, replayed "),
        ("num_computed_tokens", first(9), r"num_computed_tokens, row 0 \(r.+\): recorded 9, replayed "),
        ("num_sampled", first(0), r"num_sampled, row 0 \(r.+\): recorded 0, replayed 1"),
        ("num_new_blocks", first(5), r"num_new_blocks, row 0 \(r.+\): recorded 5, replayed "),
        ("dropped_request_ids", lambda ids: ("y",), r"dropped_request_ids: recorded \('y',\), replayed \(\)"),
    ],
)
def test_a_plan_that_differs_is_named_by_field_and_row(field: str, change: Any, says: str) -> None:
    records = a_log(SMALL)
    place = next(i for i, record in enumerate(records) if isinstance(record, Planned) and record.plan.step == 2)
    planned = records[place]
    assert isinstance(planned, Planned)
    plan = msgspec.structs.replace(planned.plan, **{field: change(getattr(planned.plan, field))})
    records[place] = Planned(planned.now, plan)
    with pytest.raises(PlanDiffers, match=says) as raised:
        replayed(SMALL, records)
    assert raised.value.recorded == plan
    assert raised.value.replayed == planned.plan


def test_blocks_and_new_requests_that_differ_are_named() -> None:
    records = a_log(SMALL)
    place = next(i for i, record in enumerate(records) if isinstance(record, Planned) and record.plan.new_requests)
    planned = records[place]
    assert isinstance(planned, Planned)
    plan = planned.plan
    first, row_blocks = plan.new_requests[0], ints(plan.num_new_blocks)[0]
    blocks = ints(plan.new_block_ids)

    def differs(**fields: Any) -> str:
        changed: StepPlan = msgspec.structs.replace(plan, **fields)
        records[place] = Planned(planned.now, changed)  # type: ignore[union-attr]
        with pytest.raises(PlanDiffers) as raised:
            replayed(SMALL, records)
        return str(raised.value).removeprefix(f"step {plan.step} differs: ")

    assert differs(new_block_ids=int32([99, *blocks[1:]])) == (
        f"new_block_ids, row 0 ({plan.request_ids[0]}): recorded {[99, *blocks[1:row_blocks]]},"
        f" replayed {blocks[:row_blocks]}"
    )
    tokens = ints(first.token_ids)
    changed = msgspec.structs.replace(first, token_ids=int32([*tokens[:-1], 555]))
    assert differs(new_requests=(changed, *plan.new_requests[1:])) == (
        f"new_requests, row 0 ({first.request_id}): token {len(tokens) - 1}: recorded 555, replayed {tokens[-1]}"
    )
    assert differs(new_requests=()).startswith("new_requests: recorded (), replayed ('")


def test_a_changed_input_is_found() -> None:
    """Another sampled token: it is in the plan that recomputes its request after the preemption."""
    records = a_log(SMALL)
    place = next(i for i, record in enumerate(records) if isinstance(record, StepApplied) and record.now == 3.0)
    applied = records[place]
    assert isinstance(applied, StepApplied)
    assert applied.result is not None
    tokens = [token + 1000 for token in ints(applied.result.sampled_token_ids)]
    result = msgspec.structs.replace(applied.result, sampled_token_ids=int32(tokens))
    records[place] = StepApplied(applied.now, result)
    with pytest.raises(PlanDiffers, match=r"new_requests, row \d \(.*\): token \d+: recorded 2, replayed 1002"):
        replayed(SMALL, records)


def test_a_lost_input_is_found() -> None:
    records = a_log(SMALL)
    abort = next(record for record in records if isinstance(record, Aborted))
    with pytest.raises(PlanDiffers):
        replayed(SMALL, [record for record in records if record is not abort])
