"""The plan's columns, what the worker is told to forget, deadlines, stories, and when there is something to run."""

from __future__ import annotations

import re

import pytest

from actors.messages.errors import ConfigurationError, RefusalReason
from actors.messages.plan import StepResult
from actors.scheduling.checks import InvariantBroken
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step
from tests.scheduling.simulated import ints


def test_the_columns_of_a_plan() -> None:
    core = core_of(max_num_batched_tokens=12)
    core.add(request_of("a", 9), 0.0)
    core.add(request_of("b", 10, 100), 0.0)
    plan = core.schedule(0.0)
    assert plan.request_ids == ("a", "b")
    assert (ints(plan.num_scheduled_tokens), ints(plan.num_computed_tokens)) == ([9, 3], [0, 0])
    assert ints(plan.num_sampled) == [1, 0], "b's prompt goes on in the next step"
    assert (ints(plan.num_new_blocks), ints(plan.new_block_ids)) == ([3, 1], [1, 2, 3, 4])
    assert [(new.request_id, ints(new.token_ids), new.num_prompt_tokens) for new in plan.new_requests] == [
        ("a", list(range(9)), 9),
        ("b", list(range(100, 110)), 10),
    ]
    core.apply(result_of(plan), 0.0)
    plan = core.schedule(0.0)
    assert (plan.step, plan.new_requests, plan.num_tokens) == (2, (), 8)
    assert (ints(plan.num_computed_tokens), ints(plan.num_sampled)) == ([9, 3], [1, 1])
    assert (ints(plan.num_new_blocks), ints(plan.new_block_ids)) == ([0, 2], [5, 6]), "only what is new"


def test_a_preempted_request_is_dropped_and_comes_back_as_new_with_all_its_tokens() -> None:
    core = core_of(usable_blocks=3)
    core.add(request_of("a", 4, max_tokens=2), 0.0)
    core.add(request_of("b", 8, 100), 0.0)
    run_step(core)
    plan = core.schedule(0.0)
    assert (counts(plan), plan.dropped_request_ids) == ({"a": 1}, ("b",))
    core.apply(result_of(plan), 0.0)
    plan = core.schedule(0.0)
    assert (counts(plan), plan.dropped_request_ids) == ({"b": 9}, ("a",))
    assert ints(plan.new_requests[0].token_ids) == [*range(100, 108), 7]


def test_an_id_that_comes_again_is_dropped_first() -> None:
    core = core_of()
    core.add(request_of("a", 4), 0.0)
    run_step(core)
    core.abort("a", 0.0)
    core.add(request_of("a", 5, 100), 0.0)
    plan = core.schedule(0.0)
    assert (plan.dropped_request_ids, [new.request_id for new in plan.new_requests]) == (("a",), ["a"])
    core.apply(result_of(plan), 0.0)
    assert core.schedule(0.0).dropped_request_ids == ()


def test_an_empty_plan_keeps_its_drops_for_the_next_and_takes_no_number() -> None:
    core = core_of()
    core.add(request_of("a", 4, max_tokens=1), 0.0)
    run_step(core)
    empty = core.schedule(0.0)
    assert (empty.request_ids, empty.dropped_request_ids) == ((), ())
    core.add(request_of("b", 4), 0.0)
    plan = core.schedule(0.0)
    assert (plan.step, plan.dropped_request_ids) == (2, ("a",))


def test_results_that_nobody_waits_for() -> None:
    core = core_of()
    core.add(request_of("a", 4), 0.0)
    result = result_of(core.schedule(0.0))
    core.apply(StepResult(99, b"", b""), 0.0)
    core.apply(result, 0.0)
    core.apply(result, 0.0)
    assert core.stats().late_events_total == 2
    assert [output.token_ids for output in outputs(core)] == [(7,)]


def test_a_result_for_an_aborted_request_is_ignored() -> None:
    core = core_of(usable_blocks=4)
    core.add(request_of("a", 4), 0.0)
    plan = core.schedule(0.0)
    core.abort("a", 0.0)
    core.take_effects()
    core.apply(result_of(plan), 0.0)
    assert core.take_effects() == []
    assert core.num_free_blocks == 4


def test_deadlines_in_every_queue() -> None:
    core = core_of(max_num_seqs=1)
    core.add(request_of("runs", 4, deadline=9.0), 0.0)
    core.add(request_of("waits", 4, deadline=5.0), 0.0)
    core.add(request_of("never", 4), 0.0)
    run_step(core, 1.0)
    outputs(core)
    assert core.next_deadline() == 5.0
    core.expire(4.9)
    assert outputs(core) == []
    core.expire(5.0)
    (late,) = outputs(core)
    assert (late.request_id, late.error) == ("waits", RefusalReason.DEADLINE_EXCEEDED.value)
    assert late.error_text == ("the deadline passed; the request was in state queued (max_num_seqs 1 reached)")
    assert core.next_deadline() == 9.0
    core.expire(20.0)
    assert core.next_deadline() is None
    assert core.live_request_ids() == ["never"]
    core.check()


def test_a_story_says_why_and_has_no_gap() -> None:
    core = core_of(usable_blocks=3)
    core.add(request_of("a", 9, max_tokens=2), 0.0)
    core.add(request_of("b", 8, 100, max_tokens=1, arrival=0.5), 1.0)
    core.add(request_of("c", 4, 200, max_tokens=1, arrival=0.75), 1.0)
    run_step(core, 2.0)
    waiting = core.story("b")
    assert waiting is not None
    assert [(part.reason, part.start, part.end, part.detail) for part in waiting.intervals] == [
        ("queued", 0.5, None, "needs 2 blocks, 0 free")
    ]
    behind = core.story("c")
    assert behind is not None
    assert behind.intervals[-1].detail == "behind one that waits: needs 2 blocks, 0 free"
    run_step(core, 3.0)
    core.take_effects()
    plan = core.schedule(4.0)
    core.apply(result_of(plan), 5.0)
    told = {output.request_id: output.story for output in outputs(core)}
    assert [(part.reason, part.start, part.end) for part in told["b"]] == [
        ("queued", 0.5, 4.0),
        ("prefill", 4.0, 5.0),
        ("decode", 5.0, 5.0),
    ]
    assert told["c"][0].detail == "behind one that waits: needs 2 blocks, 0 free"


def test_nothing_is_runnable_until_something_happens() -> None:
    core = core_of(usable_blocks=2)
    assert not core.has_runnable()
    core.add(request_of("a", 8, max_tokens=1), 0.0)
    core.add(request_of("b", 8, 100), 0.0)
    assert core.has_runnable()
    plan = core.schedule(0.0)
    assert not core.schedule(0.0).request_ids
    assert not core.has_runnable(), "b does not fit and a waits for its result"
    core.apply(result_of(plan), 0.0)
    assert core.has_runnable()


def test_a_step_that_only_preempted_is_followed_by_another() -> None:
    """Priority: the first of `running` is its own victim; the step is empty and the others still have tokens to do."""
    core = core_of(usable_blocks=4, policy="priority", pass_over_self_victim=False)
    core.add(request_of("low", 8, priority=5), 0.0)
    first = core.schedule(0.0)
    core.add(request_of("high", 6, 100, priority=0), 0.0)
    assert run_step(core) == {"high": 6}
    core.apply(result_of(first), 0.0)
    assert run_step(core) == {}
    assert core.has_runnable()
    assert run_step(core) == {"high": 1}


def test_an_id_that_is_live_may_not_be_added_again() -> None:
    core = core_of()
    core.add(request_of("a", 4), 0.0)
    with pytest.raises(InvariantBroken, match=r"an id that is live was added again.*its story: queued from 0"):
        core.add(request_of("a", 4), 0.0)


def test_check_finds_a_lost_block() -> None:
    core = core_of(usable_blocks=4)
    core.add(request_of("a", 8), 0.0)
    run_step(core)
    request = core.live("a")
    assert request is not None
    request.block_ids.pop()
    with pytest.raises(InvariantBroken, match="block 2 has 1 references and 0 grants name it"):
        core.check()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("watermark", 1.5, "watermark 1.5 is not a fraction"),
        ("block_size", 0, "Expected `int` >= 1 - at `$.block_size`"),
        ("usable_blocks", 0, "Expected `int` >= 1 - at `$.usable_blocks`"),
        ("long_prefill_token_threshold", -3, "Expected `int` >= 0 - at `$.long_prefill_token_threshold`"),
    ],
)
def test_a_limit_out_of_its_bounds_is_refused_by_name(field: str, value: float, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        core_of(**{field: value})


def test_the_story_of_a_request_that_was_preempted_says_when_it_decodes_again() -> None:
    core = core_of(usable_blocks=4, kv_connector=False)
    core.add(request_of("a", 7, max_tokens=4), 0.0)
    core.add(request_of("b", 8, 100, max_tokens=3), 0.0)
    for now in range(1, 9):
        run_step(core, float(now))
    (last,) = [output for output in outputs(core) if output.request_id == "b" and output.finish_reason]
    assert [(part.reason, part.start) for part in last.story] == [
        ("queued", 0.0),
        ("prefill", 1.0),
        ("decode", 1.0),
        ("preempted", 2.0),
        ("prefill", 5.0),
        ("decode", 5.0),
    ]
