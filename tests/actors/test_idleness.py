"""Which of the executor's waiting counts as lost. Times are made up; the expected values are differences by hand."""

from __future__ import annotations

from actors.idleness import Idleness


def test_between_two_steps_of_running_requests_all_waiting_is_lost() -> None:
    idle = Idleness()
    idle.step_dispatched(0, now=1.0)
    idle.runnable(True, now=1.0)
    assert idle.step_completed(0, waited=0.0, busy=0.5, now=1.5) == 0.0
    idle.step_dispatched(1, now=1.625)
    idle.runnable(True, now=1.625)
    assert idle.step_completed(1, waited=0.125, busy=0.5, now=2.125) == 0.125


def test_before_a_request_came_nothing_is_lost() -> None:
    """Seen at 10.0 and dispatched at once; the step began a quarter later, after a pause of 9 s."""
    idle = Idleness()
    idle.runnable(False, now=1.0)
    idle.step_dispatched(0, now=10.0)
    assert idle.step_completed(0, waited=9.0, busy=1.0, now=11.25) == 0.25


def test_work_that_waits_for_its_plan_counts_from_when_it_was_seen() -> None:
    idle = Idleness()
    idle.runnable(True, now=10.0)  # seen, not planned yet
    idle.step_dispatched(0, now=12.0)
    assert idle.step_completed(0, waited=9.0, busy=1.0, now=13.0) == 2.0


def test_when_the_last_request_has_ended_the_count_begins_anew() -> None:
    idle = Idleness()
    idle.step_dispatched(0, now=1.0)
    idle.step_completed(0, waited=0.0, busy=1.0, now=2.0)
    idle.runnable(False, now=2.0)
    idle.step_dispatched(1, now=5.0)
    assert idle.step_completed(1, waited=3.0, busy=1.0, now=6.0) == 0.0


def test_steps_planned_ahead_have_each_their_own_beginning() -> None:
    idle = Idleness()
    idle.step_dispatched(0, now=1.0)
    idle.step_dispatched(1, now=1.0)
    assert idle.step_completed(0, waited=1.0, busy=0.5, now=1.75) == 0.25
    assert idle.step_completed(1, waited=0.0, busy=0.5, now=2.25) == 0.0
