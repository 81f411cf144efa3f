"""What is recorded: each input before the core takes it, each plan after, and nothing else."""

from __future__ import annotations

import inspect

import pytest

from actors.configuration import SchedulerConfiguration
from actors.messages.lease import Ticket
from actors.messages.plan import StepResult
from actors.messages.request import RequestOutput
from actors.messages.transfer import LeaseGranted, RevokeLease
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import (
    Added,
    EffectsTaken,
    Expired,
    PlanFailed,
    Planned,
    Record,
    StepApplied,
)
from actors.scheduling.replay import CoreRaised, PlanDiffers
from tests.scheduling.builders import request_of, result_of
from tests.scheduling.recorded_runs import replayed


def test_every_input_of_the_core_is_recorded() -> None:
    """A method that is neither a recorded input nor a view known here would change the core behind the log's back."""
    views = {
        "blocks_report",
        "check",
        "has_runnable",
        "has_started",
        "holds_encoder_output",
        "live",
        "live_request_ids",
        "next_deadline",
        "stats",
        "story",
        "take_kv_events",
    }
    methods = {
        name for name, _ in inspect.getmembers(SchedulerCore, inspect.isfunction) if not name.startswith("_")
    } - views
    assert methods == {name for name in vars(RecordedCore) if not name.startswith("_")}


def test_only_what_changes_the_core_is_recorded() -> None:
    records: list[Record] = []
    core = RecordedCore(SchedulerConfiguration(), records.append)
    core.add(request_of("r", 5, deadline=10.0), 1.0)
    core.expire(9.0)
    core.take_effects()
    plan = core.schedule(9.0)
    core.apply(result_of(plan), 9.5)
    core.take_effects()
    core.expire(10.0)
    core.take_effects()
    core.take_effects()
    kinds = [type(record) for record in records]
    assert kinds == [Added, Planned, StepApplied, EffectsTaken, Expired, EffectsTaken]
    assert records[4] == Expired(10.0)


def test_an_input_that_makes_the_core_raise_is_the_last_record_and_raises_again() -> None:
    records: list[Record] = []
    core = RecordedCore(SchedulerConfiguration(), records.append)
    core.add(request_of("r", 5), 1.0)
    plan = core.schedule(1.0)
    with pytest.raises(ValueError, match="step 1 has 1 rows, its result 2"):
        core.apply(StepResult(plan.step, int32([1, 1]), int32([7, 7])), 2.0)
    assert isinstance(records[-1], StepApplied)
    with pytest.raises(CoreRaised, match="ValueError: step 1 has 1 rows, its result 2") as raised:
        replayed(core.config, records)
    assert raised.value.record == records[-1]


def test_a_schedule_that_raises_is_recorded_and_raises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Record] = []
    core = RecordedCore(SchedulerConfiguration(), records.append)
    core.add(request_of("r", 5), 1.0)
    core._state.num_steps = "broken"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        core.schedule(2.5)
    failed = records[-1]
    assert isinstance(failed, PlanFailed)
    assert failed.now == 2.5
    assert failed.error.startswith("TypeError: ")
    # The same code, whole: the difference is that it plans.
    with pytest.raises(PlanDiffers, match=r"the recorded run failed to plan step 1 \(TypeError: .*the replay planned"):
        replayed(core.config, records)
    monkeypatch.setattr("actors.scheduling.core.schedule_running", lambda *_: 1 / 0)
    with pytest.raises(CoreRaised, match="ZeroDivisionError"):
        replayed(core.config, records)


@pytest.mark.parametrize("taken", [True, False])
def test_whether_effects_were_taken_decides_what_an_abort_withdraws(taken: bool) -> None:
    """A ticket that has left is its client's; one that has not is withdrawn, and its lease revoked."""
    records: list[Record] = []
    core = RecordedCore(SchedulerConfiguration(kv_connector=True), records.append)
    core.add(request_of("r", 5, do_remote_decode=True, max_tokens=1), 1.0)
    core.apply(result_of(core.schedule(1.0)), 2.0)
    core.take_effects()
    ticket = Ticket("prefill-0", 1, "127.0.0.1", 1, 7, b"c" * 16, 5, b"d" * 16)
    core.apply(LeaseGranted("r", 1, ticket), 3.0)
    if taken:
        core.take_effects()
    core.abort("r", 4.0)
    run = replayed(core.config, records)
    effects = run.core.take_effects()
    assert effects == core.take_effects()
    kinds = {type(effect) for effect in effects}
    assert kinds == (set() if taken else {RequestOutput, RevokeLease})
