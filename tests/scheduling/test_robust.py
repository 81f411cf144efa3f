"""Where the reference would crash, loop or never move again (its behaviour's part F, and the design's list)."""

from __future__ import annotations

import pytest

from actors.messages.errors import RefusalReason
from actors.messages.plan import StepResult
from actors.messages.request import FinishReason
from actors.messages.transfer import BlocksLanded, BlocksQuiet, LoadBlocks, TransferFailed
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from actors.scheduling.request import EncoderInput, RequestExtras
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step, ticket_of


def generation_of_load(core: SchedulerCore, request_id: str) -> int:
    orders = [effect for effect in core.take_effects() if isinstance(effect, LoadBlocks)]
    return next(order.generation for order in orders if order.request_id == request_id)


def test_a_head_that_does_not_fit_does_not_hide_the_holder_of_its_blocks() -> None:
    core = core_of(usable_blocks=4, policy="priority", kv_load_failure_policy="recompute")
    core.add(request_of("a", 12, ticket=ticket_of(12), priority=5, max_tokens=1), 0.0)
    core.schedule(0.0)
    generation = generation_of_load(core, "a")
    core.add(request_of("head", 16, 100, max_tokens=1), 1.0)
    assert run_step(core, 1.0) == {}, "4 blocks needed, 1 free; the load is still under way"
    core.apply(BlocksLanded("a", generation), 2.0)
    assert core.has_runnable()
    assert run_step(core, 2.0) == {"a": 1}
    assert run_step(core, 3.0) == {"head": 16}


def test_if_no_holder_can_go_on_the_last_one_gives_its_blocks_back() -> None:
    core = core_of(usable_blocks=5, policy="priority", kv_load_failure_policy="recompute")
    for place, name in enumerate(("a", "b")):
        prompt = request_of(name, 8, 100 * place, ticket=ticket_of(4, 100 * place), arrival=float(place), max_tokens=9)
        core.add(prompt, 0.0)
    core.schedule(0.0)
    for order in core.take_effects():
        if isinstance(order, LoadBlocks):
            core.apply(BlocksLanded(order.request_id, order.generation), 0.0)
    for name in ("a", "b"):
        # Tokens of older steps came in meanwhile: each holds 1 block and needs 4 more; 3 are free.
        request = core.live(name)
        assert request is not None
        request.tokens += range(500, 512)
    assert run_step(core, 1.0) == {"a": 16}, "4 tokens of 20 had been loaded"
    request = core.live("b")
    assert request is not None
    assert (request.num_computed_tokens, request.block_ids) == (0, [])
    assert request.story.reason == "preempted"


def test_a_request_whose_blocks_are_in_quarantine_reserves_no_others() -> None:
    core = core_of(usable_blocks=4, policy="priority", kv_load_failure_policy="recompute")
    core.add(request_of("failed", 15, ticket=ticket_of(15), max_tokens=1), 0.0)
    core.schedule(0.0)
    generation = generation_of_load(core, "failed")
    core.apply(TransferFailed("failed", generation, "deadline", quarantined=True), 1.0)
    core.apply(BlocksQuiet("failed", generation), 2.0)
    core.add(request_of("first", 4, 100, ticket=ticket_of(4, 100), priority=-1, max_tokens=1), 2.0)
    core.schedule(2.0)
    assert core.last_step.loading == {"first": 4}, "4 blocks are free, and nobody was promised them"
    assert outputs(core) == []


def test_a_holder_whose_failed_load_left_it_nothing_is_not_asked_to_give_back() -> None:
    """It was the engine's end: tried behind a head that does not fit, it gave its blocks back and was revoked, too."""
    core = core_of(usable_blocks=5, policy="priority", kv_load_failure_policy="recompute")
    core.add(request_of("r", 17, ticket=ticket_of(4), max_tokens=3), 0.0)
    core.schedule(0.0)
    generation = generation_of_load(core, "r")
    core.add(request_of("h", 20, 100, priority=-1, max_tokens=1), 0.0)
    assert run_step(core) == {}
    core.apply(TransferFailed("r", generation, "deadline"), 1.0)
    assert [run_step(core, 1.0), run_step(core, 1.0)] == [{"h": 20}, {"r": 17}]


def test_a_result_that_comes_before_an_older_one_waits_for_it() -> None:
    core = core_of(async_scheduling=True, kv_connector=False)
    core.add(request_of("a", 4, max_tokens=3), 0.0)
    first, second = core.schedule(0.0), core.schedule(0.0)
    for _ in range(2):
        core.apply(result_of(second, token=2), 1.0)
    core.check()
    assert (outputs(core), core.stats().late_events_total) == ([], 1), "the second time it is a duplicate"
    core.apply(result_of(first, token=1), 1.0)
    core.check()
    assert [output.token_ids for output in outputs(core)] == [(1,), (2,)]


@pytest.mark.parametrize(
    ("counts_column", "tokens", "complaint"),
    [([1], [7], "2 rows"), ([1, 1], [7], "2 tokens"), ([-1, 1], [], "at most"), ([4, 1], [7] * 5, "at most")],
)
def test_a_malformed_result_is_refused_and_its_step_stays_in_flight(
    counts_column: list[int], tokens: list[int], complaint: str
) -> None:
    core = core_of(kv_connector=False)
    for place, name in enumerate("ab"):
        core.add(request_of(name, 4, 100 * place, max_tokens=1), 0.0)
    plan = core.schedule(0.0)
    with pytest.raises(ValueError, match=complaint):
        core.apply(StepResult(plan.step, int32(counts_column), int32(tokens)), 0.0)
    core.check()
    core.apply(result_of(plan), 0.0)
    assert [output.finish_reason for output in outputs(core)] == [FinishReason.LENGTH] * 2


def test_looking_at_a_request_changes_nothing() -> None:
    """A look once froze why it waits: the next reason, and its ending, then told the old one."""
    stories = []
    for looks in (False, True):
        core = core_of(max_num_seqs=1, kv_connector=False)
        core.add(request_of("runs", 4, max_tokens=9), 0.0)
        core.add(request_of("head", 4, 100), 0.0)
        core.add(request_of("waits", 4, 200, deadline=5.0), 0.0)
        run_step(core)
        story = core.story("waits")
        assert story is not None
        assert story.intervals[-1].detail == "behind one that waits: max_num_seqs 1 reached"
        if looks:
            core.pause("new")
            paused = core.story("waits")
            assert paused is not None
            assert paused.intervals[-1].detail == "the engine is paused: nobody is admitted"
            core.pause("none")
        core.expire(5.0)
        stories.append(outputs(core)[-1])
    assert stories[0] == stories[1]
    assert stories[0].error_text is not None
    assert stories[0].error_text.endswith("in state queued (behind one that waits: max_num_seqs 1 reached)")


def test_an_only_request_that_outgrows_the_pool_ends_with_an_error() -> None:
    core = core_of(usable_blocks=2, kv_connector=False)
    core.add(request_of("a", 6, max_tokens=10), 0.0)
    assert [run_step(core) for _ in range(5)] == [{"a": 6}, {"a": 1}, {"a": 1}, {}, {}]
    *tokens, last = outputs(core)
    assert len(tokens) == 3, "known 9, of which 8 fit"
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, RefusalReason.EXCEEDS_KV_CAPACITY.value)
    assert last.error_text == "9 tokens need 3 blocks, the pool has 2: use a larger KV pool"
    assert core.num_free_blocks == 2


def test_a_preempted_request_that_outgrew_the_pool_does_not_block_the_queue() -> None:
    core = core_of(usable_blocks=3, kv_connector=False)
    core.add(request_of("a", 3, max_tokens=3), 0.0)
    core.add(request_of("b", 4, 100, max_tokens=12), 0.0)
    core.add(request_of("c", 4, 200, max_tokens=1), 0.0)
    ends: dict[str, str | None] = {}
    for _ in range(30):
        run_step(core)
        ends.update({output.request_id: output.error for output in outputs(core) if output.finish_reason})
    assert ends == {"a": None, "b": RefusalReason.EXCEEDS_KV_CAPACITY.value, "c": None}


def test_what_would_break_the_core_is_refused_at_once() -> None:
    core = core_of(max_model_len=20, kv_connector=False)
    core.add(request_of("a", 20), 0.0)
    core.add(request_of("b", 4, max_tokens=1), 0.0)
    (refusal,) = outputs(core)
    assert (refusal.request_id, refusal.error) == ("a", "context_length_exceeded")
    assert run_step(core) == {"b": 4}


def test_a_head_larger_than_the_pool_waits_in_its_place_and_ends_when_nothing_else_is_left() -> None:
    # F4: the reference compares with what is free now, never with the capacity, and its queue stands still for ever.
    core = core_of(usable_blocks=3, reserve_full_sequence=True, kv_connector=False)
    core.add(request_of("runs", 4, max_tokens=2), 0.0)
    core.add(request_of("head", 13, 100), 0.0)
    core.add(request_of("behind", 4, 200, max_tokens=1), 0.0)
    assert [run_step(core), run_step(core)] == [{"runs": 4}, {"runs": 1}], "nobody overtakes the head on memory"
    assert run_step(core) == {"behind": 4}
    ends = {output.request_id: (output.error, output.error_text) for output in outputs(core) if output.finish_reason}
    assert ends["head"] == (
        "exceeds_kv_capacity",
        "it can never be scheduled: with nothing else in the engine it needs 4 blocks, 3 free",
    )


def test_a_head_whose_encoder_input_exceeds_the_budget_ends_and_says_by_how_much() -> None:
    core = core_of(kv_connector=False, encoder_budget=5, encoder_cache=50)
    core.add(request_of("a", 12), 0.0, RequestExtras((EncoderInput("image", 0, 6),)))
    core.add(request_of("b", 4, 100, max_tokens=1), 0.0)
    assert run_step(core) == {"b": 4}
    assert next((output.request_id, output.error, output.error_text) for output in outputs(core)) == (
        "a",
        "invalid_request",
        "it can never be scheduled: with nothing else in the engine it has an encoder input of 6 tokens, 5 left in"
        " the step's budget",
    )


def test_a_running_request_whose_next_encoder_input_is_too_large_ends() -> None:
    # The reference has it in `running` for ever: its first tokens need no encoder, its next none of which can be had.
    core = core_of(kv_connector=False, encoder_budget=9, encoder_cache=5)
    core.add(request_of("a", 12), 0.0, RequestExtras((EncoderInput("image", 3, 6),)))
    core.add(request_of("b", 4, 100, max_tokens=1), 0.0)
    assert [run_step(core), run_step(core)] == [{"a": 3, "b": 4}, {}]
    ends = {output.request_id: output.error_text for output in outputs(core) if output.finish_reason}
    assert ends == {
        "a": "it can never go on: it has an encoder input of 6 tokens, 5 free in the cache",
        "b": None,
    }
    assert core.num_free_blocks == core.stats().blocks_free == 10_000


def test_the_head_is_not_failed_while_a_skipped_request_may_still_be_promoted() -> None:
    core = core_of(usable_blocks=3, kv_connector=False)
    core.add(request_of("gated", 4, max_tokens=1), 0.0, RequestExtras(needs_grammar=True))
    core.add(request_of("head", 13, 100), 0.0)
    assert run_step(core) == {}
    assert outputs(core) == []
    core.grammar_ready("gated")
    assert [run_step(core), run_step(core)] == [{"gated": 4}, {}]
    assert [output.request_id for output in outputs(core)] == ["gated", "head"]


def test_the_head_is_not_failed_while_the_engine_is_paused() -> None:  # or blocks may come back: test_liveness.py
    core = core_of(usable_blocks=3, kv_connector=False)
    core.add(request_of("head", 13), 0.0)
    core.pause("new")
    assert run_step(core) == {}
    assert outputs(core) == []
    core.pause("none")
    assert run_step(core) == {}
    assert [output.error for output in outputs(core)] == ["exceeds_kv_capacity"]


def test_min_tokens_beyond_the_room_left_ends_with_length() -> None:
    core = core_of(max_model_len=6)
    core.add(request_of("a", 4, max_tokens=9, min_tokens=9, eos_token_ids=(7,)), 0.0)
    run_step(core)
    run_step(core)
    assert [output.finish_reason for output in outputs(core)] == [None, FinishReason.LENGTH]


def test_without_chunked_prefill_a_prompt_over_the_budget_goes_alone() -> None:
    core = core_of(chunked_prefill=False, max_num_batched_tokens=8, max_model_len=64)
    core.add(request_of("a", 12, max_tokens=1), 0.0)
    core.add(request_of("b", 4, 100, max_tokens=1), 0.0)
    assert [run_step(core), run_step(core)] == [{"a": 8}, {"a": 4, "b": 4}]


def test_two_forced_resets_with_tokens_in_flight() -> None:
    core = core_of(async_scheduling=True, prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 4, max_tokens=3), 0.0)
    stale = [core.schedule(0.0), core.schedule(0.0)]
    assert core.reset_prefix_cache(0.0, preempt_running=True)
    plan = core.schedule(1.0)
    assert counts(plan) == {"a": 4}
    stale.append(plan)
    assert core.reset_prefix_cache(1.0, preempt_running=True)
    fresh = core.schedule(2.0)
    core.check()
    for plan in stale:
        core.apply(result_of(plan, token=666), 2.0)
        core.check()
    assert outputs(core) == [], "dropped: they were drawn before the reset"
    core.apply(result_of(fresh), 3.0)
    assert [run_step(core, 3.0), run_step(core, 3.0)] == [{"a": 1}, {"a": 1}]
    assert [output.token_ids for output in outputs(core)] == [(7,), (7,), (7,)]


def test_a_victim_that_was_passed_over_does_not_hide_the_next_request() -> None:
    core = core_of(usable_blocks=3, policy="priority", async_scheduling=True, kv_connector=False)
    core.add(request_of("victim", 4, priority=9, max_tokens=1), 0.0)
    core.schedule(0.0)  # stays in flight, and brings its last token: it lacks none in the next steps
    core.add(request_of("r", 4, 100, priority=0), 0.0)
    core.add(request_of("s", 3, 200, priority=1), 0.0)
    core.schedule(0.0)
    plan = core.schedule(0.0)
    core.check()
    assert core.last_step.preempted == ["victim"]
    assert counts(plan) == {"r": 1, "s": 1}


def test_what_a_victim_did_not_compute_is_not_found_in_the_cache() -> None:
    core = core_of(usable_blocks=4, policy="priority", prefix_caching=True, kv_connector=False)
    core.add(request_of("victim", 7, priority=9), 0.0)
    core.add(request_of("r", 8, 100, priority=0), 0.0)
    run_step(core)
    # The victim's second block would be full with this step, but r takes its blocks in the same step.
    assert run_step(core) == {"r": 1}
    core.abort("victim", 1.0)
    core.abort("r", 1.0)
    core.add(request_of("w", 9), 1.0)
    core.schedule(1.0)
    assert core.last_step.cached == {"w": 4}


def test_blocks_of_an_aborted_request_are_fenced_until_the_step_has_returned() -> None:
    core = core_of(usable_blocks=4, fence_frees=True)
    core.add(request_of("a", 16), 0.0)
    plan = core.schedule(0.0)
    core.abort("a", 1.0)
    core.check()
    assert (core.stats().blocks_fenced, core.num_free_blocks) == (4, 0)
    (grant,) = core.blocks_report(3.0).grants
    assert (grant.state, grant.reason, grant.age_s) == ("fenced", "step 1 is in flight", 2.0)
    core.apply(result_of(plan), 4.0)
    assert (core.stats().blocks_fenced, core.num_free_blocks) == (0, 4)


def test_nobody_is_preempted_for_blocks_that_come_back_with_the_step_in_flight() -> None:
    core = core_of(usable_blocks=3, fence_frees=True, max_num_batched_tokens=8)
    core.add(request_of("gone", 4), 0.0)
    core.add(request_of("r", 12, 100), 0.0)
    plan = core.schedule(0.0)
    assert counts(plan) == {"gone": 4, "r": 4}
    core.abort("gone", 0.0)
    assert counts(core.schedule(0.0)) == {}, "r needs 2 blocks: 1 is free, 1 is fenced"
    assert core.last_step.preempted == []
    core.apply(result_of(plan), 0.0)
    assert counts(core.schedule(0.0)) == {"r": 8}
