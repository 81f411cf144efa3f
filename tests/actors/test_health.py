"""The watchdog's verdicts, with the limits of the design: 5 s, or 10 × the longest step of the size."""

from __future__ import annotations

from actors.health import Watchdog


def watchdog() -> Watchdog:
    return Watchdog(max_quarantined_blocks=10)


def test_an_engine_without_work_is_healthy_for_ever() -> None:
    assert watchdog().verdict({"scheduler": 1.0}, now=1e6).healthy


def test_a_silent_actor_is_unhealthy_after_five_seconds() -> None:
    assert watchdog().verdict({"executor": 5.0}, now=0).healthy
    verdict = watchdog().verdict({"executor": 5.1}, now=0)
    assert not verdict.healthy
    assert verdict.reason == "actor executor has not answered for 5.1 s"


def test_a_step_may_take_five_seconds_before_one_of_its_size_was_seen() -> None:
    dog = watchdog()
    dog.step_dispatched(1, 100, now=0.0)
    assert dog.verdict({}, now=5.0).healthy
    assert dog.verdict({}, now=5.1).reason == "step 1 runs for 5.1 s; its limit is 5.0 s"


def test_a_step_may_take_ten_times_the_longest_of_its_size() -> None:
    dog = watchdog()
    dog.step_dispatched(1, 2000, now=0.0)
    dog.step_completed(1, now=2.0)
    dog.step_dispatched(2, 2000, now=10.0)
    assert dog.verdict({}, now=29.9).healthy  # 10 + 10 × 2 s
    assert not dog.verdict({}, now=30.1).healthy
    dog.step_completed(2, now=30.1)
    dog.step_dispatched(3, 1, now=31.0)  # another size: back to five seconds
    assert not dog.verdict({}, now=36.1).healthy


def test_the_first_large_step_may_take_ten_times_its_tokens_at_the_pace_of_the_warm_up() -> None:
    dog = watchdog()
    dog.warmed_up(0.004)  # 1 s for 256 tokens
    dog.step_dispatched(1, 2048, now=0.0)
    assert dog.verdict({}, now=81.9).healthy  # 10 × 2,048 × 0.004 s = 81.92 s
    assert not dog.verdict({}, now=82.0).healthy
    dog.step_completed(1, now=82.0)
    dog.step_dispatched(2, 64, now=100.0)
    assert dog.verdict({}, now=105.0).healthy  # 10 × 64 × 0.004 s is less than 5 s
    assert not dog.verdict({}, now=105.1).healthy


def test_runnable_requests_without_a_plan_are_unhealthy() -> None:
    dog = watchdog()
    dog.runnable(True, now=1.0)
    dog.runnable(True, now=4.0)
    assert dog.verdict({}, now=6.0).healthy
    assert dog.verdict({}, now=6.1).reason == "runnable requests have seen no plan for 5.1 s"
    dog.step_dispatched(1, 1, now=6.2)
    dog.step_completed(1, now=6.3)
    assert dog.verdict({}, now=60.0).healthy


def test_more_quarantine_than_the_budget_is_unhealthy() -> None:
    dog = watchdog()
    dog.quarantined(10)
    assert dog.verdict({}, now=0).healthy
    dog.quarantined(11)
    assert not dog.verdict({}, now=0).healthy
