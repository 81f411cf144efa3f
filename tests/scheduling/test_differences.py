"""Where this scheduler differs from the reference on purpose, beside `test_robust.py`: which rule, and why.

F and O numbers are those of the reference behaviour's part F. Rules with a key are shown on both sides: what the
configuration's default does is what the reference does (and what scenarios see); an engine sets the other one.
"""

from __future__ import annotations

import pytest

from actors.configuration import ROBUST_RULES, SchedulerConfiguration
from actors.messages.request import FinishReason
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    CancelLoad,
    LoadBlocks,
    TransferFailed,
    TransferOrder,
)
from actors.scheduling.connector import RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import EncoderInput, RequestExtras, SchedulerRequest
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step, ticket_of

REFERENCE = {
    "fence_frees": False,
    "standstill_patience": 100,
    "forget_uncomputed": False,
    "trim_padding": False,
    "pass_over_self_victim": False,
    "readmit_while_pausing": False,
}


class AllRemote:
    """However often it is asked: the whole prompt can be loaded."""

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        return RemoteMatch(len(request.tokens) - num_local_tokens, is_async=True)

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        return None

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        return 0


def generation_of(core: SchedulerCore, request_id: str) -> int:
    request = core.live(request_id)
    assert request is not None
    assert request.grant is not None
    return request.grant.generation


def test_the_reference_s_side_of_each_key_is_the_default() -> None:
    defaults = SchedulerConfiguration()
    assert {key: getattr(defaults, key) for key in REFERENCE} == REFERENCE
    assert REFERENCE.keys() == ROBUST_RULES.keys()


@pytest.mark.parametrize(("pass_over_self_victim", "scheduled"), [(False, {}), (True, {"hi": 1})])
def test_o2_a_request_that_preempts_itself(pass_over_self_victim: bool, scheduled: dict[str, int]) -> None:
    """Row 18. The reference ends its step there, though a more important request behind it could run."""
    core = core_of(usable_blocks=4, policy="priority", kv_connector=False, pass_over_self_victim=pass_over_self_victim)
    core.add(request_of("lo", 8, priority=5), 0.0)
    first = core.schedule(0.0)
    core.add(request_of("hi", 6, 100, priority=0), 0.0)
    second = core.schedule(0.0)
    assert (counts(first), counts(second)) == ({"lo": 8}, {"hi": 6})
    for plan in (first, second):
        core.apply(result_of(plan), 0.0)
    assert run_step(core) == scheduled
    assert core.last_step.preempted == ["lo"]


def test_f1_a_report_that_nobody_waits_for_is_counted() -> None:
    """The reference asserts that a finished transfer belongs to a known request in one of two states, and dies."""
    core = core_of(usable_blocks=4)
    core.add(request_of("a", 8, ticket=ticket_of(8)), 0.0)
    core.schedule(0.0)
    generation = generation_of(core, "a")
    core.abort("a", 1.0)
    assert core.num_free_blocks == 2, "the READ may still write"
    reports = [BlocksLanded, BlocksLanded, BlocksSent, BlocksQuiet]
    for report in reports:
        core.apply(report("a", generation), 2.0)
        core.check()
    core.apply(TransferFailed("never heard of", 99, "expired", quarantined=True), 2.0)
    assert (core.num_free_blocks, core.stats().late_events_total) == (4, 4)


def test_f2_a_token_in_flight_reaches_a_preempted_request_before_it_is_resumed() -> None:
    """The reference resumes it at once, and its hand-kept count of tokens in flight goes below zero."""
    core = core_of(usable_blocks=4, async_scheduling=True, kv_connector=False)
    core.add(request_of("a", 8), 0.0)
    core.add(request_of("b", 8, 100), 0.0)
    first = core.schedule(0.0)
    second = core.schedule(0.0)
    assert (counts(second), core.last_step.preempted) == ({"a": 1}, ["b"])
    core.abort("a", 0.0)
    assert counts(core.schedule(0.0)) == {}, "4 blocks are free, but b's first token is still on its way"
    core.apply(result_of(first), 1.0)
    core.check()
    assert [output.token_ids for output in outputs(core) if output.request_id == "b"] == [(7,)]
    resumed = core.schedule(1.0)
    assert counts(resumed) == {"b": 9}, "its prompt and that token"
    core.apply(result_of(second), 1.0)
    core.apply(result_of(resumed, token=8), 1.0)
    assert [output.token_ids for output in outputs(core)] == [(8,)]


def test_f3_o3_two_loads_that_together_promise_too_much_still_both_end() -> None:
    """8 tokens a block, 16 blocks: 10 for a, 7 for b. The reference reserves the rest of others, not of the candidate:

    both loads start. There a preempts itself at its first token, again and again, for as long as b's load takes.
    """
    core = core_of(block_size=8, usable_blocks=16, kv_load_failure_policy="recompute", reserve_full_sequence=True)
    core.add(request_of("a", 80, ticket=ticket_of(32), max_tokens=2), 0.0)
    core.add(request_of("b", 56, 1000, ticket=ticket_of(48, 1000), max_tokens=2), 0.0)
    core.schedule(0.0)
    assert (core.last_step.loading, core.num_free_blocks) == ({"a": 32, "b": 48}, 6)
    generations = {name: generation_of(core, name) for name in "ab"}
    core.apply(BlocksLanded("a", generations["a"]), 1.0)
    assert [run_step(core), run_step(core)] == [{"a": 48}, {}]
    assert core.last_step.preempted == ["a"]
    assert run_step(core) == {}, "81 tokens need 11 blocks, b holds 6 of 16"
    core.apply(BlocksLanded("b", generations["b"]), 2.0)
    assert [run_step(core) for _ in range(3)] == [{"b": 8}, {"b": 1}, {"a": 81}]
    assert [output.finish_reason for output in outputs(core)] == [None, None, FinishReason.LENGTH, FinishReason.LENGTH]


def test_f5_a_parked_request_has_a_deadline_and_its_blocks_outlive_it() -> None:
    """The reference waits for a peer that may be dead, without limit; freeing by time would let a READ hit others."""
    core = core_of(usable_blocks=4)
    core.add(request_of("a", 8, ticket=ticket_of(8), deadline=9.0), 0.0)
    core.schedule(0.0)
    generation = generation_of(core, "a")
    core.take_effects()
    core.expire(9.0)
    cancel, error = core.take_effects()
    assert cancel == CancelLoad("a", generation)
    assert getattr(error, "error", None) == "deadline_exceeded"
    assert core.num_free_blocks == 2
    core.apply(TransferFailed("a", generation, "cancelled", quarantined=True), 10.0)
    assert (core.num_free_blocks, core.stats().blocks_quarantined) == (2, 2)
    core.apply(BlocksQuiet("a", generation), 11.0)
    assert core.num_free_blocks == 4


@pytest.mark.parametrize("way_out", ["abort", "expire"])
def test_f14_a_grammar_that_never_comes_is_its_request_s_own_trouble(way_out: str) -> None:
    """In the reference a failed compilation raises inside schedule(). The core calls no grammar: it is told."""
    core = core_of(kv_connector=False)
    core.add(request_of("gated", 4, deadline=5.0), 0.0, RequestExtras(needs_grammar=True))
    core.add(request_of("other", 4, 100), 0.0)
    assert run_step(core) == {"other": 4}
    if way_out == "abort":
        core.abort("gated", 5.0, "its grammar does not compile")
    else:
        core.expire(5.0)
    assert run_step(core) == {"other": 1}
    assert "gated" not in core.live_request_ids()


def test_f18_who_is_not_admitted_keeps_no_encoder_output() -> None:
    core = core_of(
        usable_blocks=6,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        max_model_len=64,
        encoder_budget=6,
        encoder_cache=6,
        reserve_full_sequence=True,
        kv_connector=False,
    )
    core.add(request_of("warm", 8, max_tokens=1), 0.0, RequestExtras((EncoderInput("i", 0, 6),)))
    assert run_step(core) == {"warm": 8}
    core.add(request_of("r", 24, 100), 0.0, RequestExtras((EncoderInput("j", 8, 6),)))
    core.add(request_of("refused", 20, 200), 0.0, RequestExtras((EncoderInput("i", 0, 6),)))
    assert run_step(core) == {"r": 8}, "the other one's 5 blocks do not fit; i was in the cache for it"
    assert run_step(core) == {"r": 8}, "j takes i's place"


def test_f20_a_prefix_hit_is_counted_when_it_is_used() -> None:
    """The reference counts each lookup, so a head that waits for blocks raises the rate with every step."""
    core = core_of(usable_blocks=8, prefix_caching=True, kv_connector=False)
    core.add(request_of("warm", 8, max_tokens=1), 0.0)
    core.add(request_of("r", 16, 100, max_tokens=3), 0.0)
    run_step(core)
    core.add(request_of("head", 24, max_tokens=1), 0.0)
    assert [run_step(core), run_step(core)] == [{"r": 1}, {"r": 1}]
    assert core.stats().prefix_hit_tokens_total == 0
    assert run_step(core) == {"head": 16}
    assert core.stats().prefix_hit_tokens_total == 8


def test_o1_a_request_that_is_planned_to_the_end_of_the_context_is_passed_over() -> None:
    """Prompt 4, context 6, two drafts: with steps in flight the reference's count goes negative and trips it."""
    core = core_of(max_model_len=6, async_scheduling=True, num_spec_tokens=2, kv_connector=False)
    core.add(request_of("a", 4, max_tokens=99), 0.0)
    plans = [core.schedule(0.0) for _ in range(4)]
    assert [counts(plan) for plan in plans] == [{"a": 4}, {"a": 1}, {}, {}]
    for plan in plans[:2]:
        core.apply(result_of(plan), 1.0)
        core.check()
    assert [output.finish_reason for output in outputs(core)] == [None, FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("trim_padding", "num_drafts", "num_computed"),
    [(False, 4, 7), (True, 2, 9)],
)
def test_a_padded_row_cut_by_the_threshold(trim_padding: bool, num_drafts: int, num_computed: int) -> None:
    """A lone last token is padded with K = 4 empty drafts, of which the threshold leaves 2.

    The reference keeps 4, and takes 4 back when they are rejected: two tokens are computed twice.
    """
    core = core_of(num_spec_tokens=4, long_prefill_token_threshold=3, prefix_caching=True, trim_padding=trim_padding)
    core.add(request_of("warm", 9, max_tokens=1), 0.0)
    for _ in range(3):
        run_step(core)
    core.add(request_of("decodes", 2, 100), 0.0)
    run_step(core)
    core.add(request_of("a", 9), 0.0)
    plan = core.schedule(0.0)
    assert counts(plan) == {"decodes": 1, "a": 3}
    assert core.last_step.drafts == {"a": [-1] * num_drafts}
    core.apply(result_of(plan), 0.0)
    request = core.live("a")
    assert request is not None
    assert request.num_computed_tokens == num_computed, "11 planned; 10 are known, the last of them not computed"


@pytest.mark.parametrize(("forget_uncomputed", "num_cached"), [(False, 20), (True, 16)])
def test_what_a_victim_was_to_compute_in_its_last_step(forget_uncomputed: bool, num_cached: int) -> None:
    """The reference leaves it in the prefix cache: a later request reads KV that nobody wrote."""
    core = core_of(
        usable_blocks=8,
        policy="priority",
        long_prefill_token_threshold=8,
        prefix_caching=True,
        kv_connector=False,
        forget_uncomputed=forget_uncomputed,
    )
    core.add(request_of("victim", 25, priority=9), 0.0)
    assert run_step(core) == {"victim": 8}
    core.add(request_of("r", 8, 100, priority=0), 0.0)
    assert [run_step(core), run_step(core)] == [{"victim": 8, "r": 8}, {"r": 1}]
    assert core.last_step.preempted == ["victim"], "2 more blocks were planned for it; r takes one of them"
    core.abort("victim", 1.0)
    core.abort("r", 1.0)
    core.add(request_of("same", 25), 1.0)
    core.schedule(1.0)
    assert core.last_step.cached == {"same": num_cached}


@pytest.mark.parametrize(("fence_frees", "num_free"), [(False, 4), (True, 0)])
def test_f11_blocks_of_a_step_in_flight(fence_frees: bool, num_free: int) -> None:
    """The reference fences frees with async scheduling and a consumer connector only; a READ ignores that order."""
    core = core_of(usable_blocks=4, fence_frees=fence_frees)
    core.add(request_of("a", 16), 0.0)
    plan = core.schedule(0.0)
    core.abort("a", 0.0)
    assert core.num_free_blocks == num_free
    core.apply(result_of(plan), 1.0)
    assert core.num_free_blocks == 4


@pytest.mark.parametrize("patience", [0, 5])
def test_a_standstill_is_broken_when_patience_has_run_out(patience: int) -> None:
    """A head of 4 blocks, a parked request that holds 3 of 4: the reference stands still until somebody is aborted.

    Because an abort may come, scenarios have a patience of 100 steps; the engine has none.
    """
    core = core_of(usable_blocks=4, policy="priority", kv_load_failure_policy="recompute", standstill_patience=patience)
    core.add(request_of("a", 12, ticket=ticket_of(12), priority=5, max_tokens=1), 0.0)
    core.schedule(0.0)
    core.add(request_of("head", 16, 100, max_tokens=1), 0.0)
    core.apply(BlocksLanded("a", generation_of(core, "a")), 1.0)
    steps = [run_step(core) for _ in range(max(patience, 1))]
    assert steps[:-1] == [{}] * (patience - 1)
    assert steps[-1] == {"a": 1}
    assert run_step(core) == {"head": 16}


def test_two_requests_that_came_at_the_same_time_do_not_preempt_each_other_for_ever() -> None:
    """Of a tie the reference takes the first of `running`, which comes back behind the other: they change places."""
    core = core_of(usable_blocks=5, policy="priority", kv_connector=False)
    for place, name in enumerate("ab"):
        core.add(request_of(name, 8, 100 * place, arrival=1.0, max_tokens=9), 0.0)
    ended: list[str] = []
    for _ in range(30):
        run_step(core)
        ended += [output.request_id for output in outputs(core) if output.finish_reason]
    assert ended == ["a", "b"]
    assert core.stats().preemptions_total == 1


def test_a_retry_after_a_failed_load_does_not_wait_for_its_own_reservation() -> None:
    """The reference counts what the failed one itself still lacks as promised to others: 4 of 4 blocks, for ever."""
    config = SchedulerConfiguration(
        usable_blocks=4, block_size=4, kv_connector=True, kv_load_failure_policy="recompute"
    )
    core = SchedulerCore(config, AllRemote())
    core.add(request_of("a", 16), 0.0)
    core.schedule(0.0)
    core.apply(TransferFailed("a", generation_of(core, "a"), "checksum"), 1.0)
    core.schedule(1.0)
    assert core.last_step.loading == {"a": 16}


def test_a_one_token_prompt_is_computed_although_all_of_it_is_remote() -> None:
    """The reference loads it, sets it back by the last token, finds nothing computed and loads it again."""
    core = SchedulerCore(SchedulerConfiguration(kv_connector=True), AllRemote())
    core.add(request_of("a", 1), 0.0)
    assert counts(core.schedule(0.0)) == {"a": 1}
    assert core.last_step.loading == {}


def test_a_load_is_ordered_once() -> None:
    """F12: one order, one report; what needs no transfer is not parked, so nobody waits for a report of nothing."""
    core = core_of(prefix_caching=True)
    core.add(request_of("warm", 9, max_tokens=1), 0.0)
    run_step(core)
    core.take_effects()
    core.add(request_of("a", 9, ticket=ticket_of(9), max_tokens=1), 1.0)
    assert run_step(core, 1.0) == {"a": 1}
    assert not [effect for effect in core.take_effects() if isinstance(effect, LoadBlocks)]


@pytest.mark.parametrize(
    ("readmit_while_pausing", "last_steps"), [(False, [{"a": 1}, {}]), (True, [{"a": 1}, {"b": 9}])]
)
def test_who_ran_and_was_preempted_goes_on_in_a_pause_that_waits(
    readmit_while_pausing: bool, last_steps: list[dict[str, int]]
) -> None:
    """B20: the reference admits nobody, so a request which had begun is left in the queue, beside those who are new."""
    core = core_of(usable_blocks=4, kv_connector=False, readmit_while_pausing=readmit_while_pausing)
    core.add(request_of("a", 8, max_tokens=3), 0.0)
    core.add(request_of("b", 8, 100, max_tokens=2), 0.0)
    assert run_step(core) == {"a": 8, "b": 8}
    core.pause("new")
    core.add(request_of("new", 4, 200), 0.0)
    assert run_step(core) == {"a": 1}
    assert core.last_step.preempted == ["b"]
    assert core.has_started()
    assert [run_step(core), run_step(core)] == last_steps
    assert not core.has_started()
    assert not core.has_runnable()
    assert core.live("new") is not None
