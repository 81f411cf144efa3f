"""What a step that has not returned still means: blocks it touches, tokens it may bring, and who must wait for it."""

from __future__ import annotations

from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import FinishReason
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step
from tests.scheduling.simulated import ints


def test_blocks_come_back_with_the_newest_step_planned_not_with_the_last_one_of_their_request() -> None:
    """A READ into them would not wait for step 2, whose writes the device may have begun."""
    core = core_of(usable_blocks=8, fence_frees=True, async_scheduling=True)
    core.add(request_of("a", 8, max_tokens=1), 0.0)
    core.add(request_of("b", 8, 100), 0.0)
    plans = [core.schedule(0.0), core.schedule(0.0)]
    assert [counts(plan) for plan in plans] == [{"a": 8, "b": 8}, {"b": 1}]
    core.abort("a", 0.0)
    (grant,) = [grant for grant in core.blocks_report(0.0).grants if grant.request_id == "a"]
    assert (grant.state, grant.blocks, grant.reason) == ("fenced", 2, "step 2 is in flight")
    core.apply(result_of(plans[0]), 1.0)
    core.check()
    assert (core.stats().blocks_fenced, core.num_free_blocks) == (2, 3), "step 1 was a's last, and it has returned"
    core.apply(result_of(plans[1]), 2.0)
    core.check()
    assert (core.stats().blocks_fenced, core.num_free_blocks) == (0, 5)


def stopped_behind_its_first_draft() -> tuple[SchedulerCore, list[StepPlan]]:
    """4 known tokens, one in step 1; step 2 brings 4 more at most, of which the second is the stop token 9."""
    core = core_of(usable_blocks=6, async_scheduling=True, num_spec_tokens=3, prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 4, max_tokens=20, stop_token_ids=(9,)), 0.0)
    plans = [core.schedule(0.0), core.schedule(0.0)]
    assert [(counts(plan), ints(plan.num_sampled)) for plan in plans] == [({"a": 4}, [1]), ({"a": 4}, [4])]
    core.apply(StepResult(1, int32([1]), int32([5])), 1.0)
    core.apply(StepResult(2, int32([4]), int32([6, 9, 9, 9])), 2.0)
    core.check()
    return core, plans


def test_tokens_behind_a_stop_are_not_in_the_prefix_cache() -> None:
    """8 tokens were computed, 7 are known: the second block holds two that nobody asked for, and is not a prefix.

    So it is the first to be used again; the first block, which the cache knows, is the last one.
    """
    core, plans = stopped_behind_its_first_draft()
    assert [ints(plan.new_block_ids) for plan in plans] == [[1], [2]]
    ends = [(output.token_ids, output.finish_reason, output.stop_token_id) for output in outputs(core)]
    assert ends == [((5,), None, None), ((6, 9), FinishReason.STOP, 9)]
    core.add(request_of("b", 24, 100), 3.0)
    assert ints(core.schedule(3.0).new_block_ids) == [2, 3, 4, 5, 6, 1]


def test_nobody_is_given_up_while_a_step_is_in_flight() -> None:
    """Without fences a's block is free at once. The head exceeds the pool, but nothing is final before step 1."""
    core = core_of(usable_blocks=3, kv_connector=False)
    core.add(request_of("a", 4), 0.0)
    plan = core.schedule(0.0)
    core.abort("a", 0.0)
    core.add(request_of("head", 13, 100), 0.0)
    core.take_effects()
    assert counts(core.schedule(0.0)) == {}
    assert (outputs(core), core.live_request_ids(), core.num_free_blocks) == ([], ["head"], 3)
    core.apply(result_of(plan), 1.0)
    assert core.has_runnable()
    assert run_step(core, 1.0) == {}
    assert [(output.request_id, output.error) for output in outputs(core)] == [("head", "exceeds_kv_capacity")]
