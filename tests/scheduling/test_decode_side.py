"""A request with a ticket: held, loaded once, landed or not, and its release obligation discharged once."""

from __future__ import annotations

import pytest

from actors.messages.errors import RefusalReason
from actors.messages.request import FinishReason
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    CancelLoad,
    HoldTicket,
    LoadBlocks,
    ReleaseTicket,
    TransferFailed,
)
from actors.scheduling.core import SchedulerCore
from tests.scheduling.builders import core_of, counts, outputs, request_of, run_step, ticket_of
from tests.scheduling.simulated import ints


def parked(length: int = 10, **config: object) -> tuple[SchedulerCore, LoadBlocks]:
    """A request of `length` tokens whose load has just been ordered at second 2, with its deadline at 22."""
    core = core_of(**config)
    core.add(request_of("a", length, ticket=ticket_of(length), deadline=22.0, max_tokens=2), 0.0)
    assert core.take_effects() == [HoldTicket("a", ticket_of(length))]
    assert not core.schedule(2.0).request_ids
    (order,) = core.take_effects()
    assert isinstance(order, LoadBlocks)
    return core, order


def test_a_load_is_ordered_into_new_blocks_with_half_the_time_left() -> None:
    core, order = parked(usable_blocks=8, load_timeout_s=30.0)
    # 10 tokens in blocks of 4: three blocks. 22 - 2 = 20 s remain, half of them for the load.
    assert (order.first_block, ints(order.block_ids), order.timeout_s) == (0, [1, 2, 3], 10.0)
    assert core.num_free_blocks == 5
    assert not core.has_runnable(), "it waits for its report"
    assert core.stats().blocks_held == 3


def test_landed_blocks_are_used_and_only_then_found_by_others() -> None:
    core, order = parked(usable_blocks=12, prefix_caching=True)
    core.add(request_of("b", 10, max_tokens=1), 2.0)
    assert run_step(core, 3.0) == {"b": 10}, "no hit in blocks that have not landed"
    core.apply(BlocksLanded("a", order.generation), 4.0)
    assert run_step(core, 4.0) == {"a": 1}, "all is there; the last token is computed again for its logits"
    last = outputs(core)[-1]
    assert (last.request_id, last.token_ids, last.num_cached_tokens) == ("a", (7,), 10)


def test_only_what_is_missing_locally_is_loaded() -> None:
    core = core_of(prefix_caching=True)
    core.add(request_of("warm", 9, max_tokens=1), 0.0)
    run_step(core)
    core.add(request_of("a", 14, ticket=ticket_of(14)), 1.0)
    core.take_effects()
    core.schedule(1.0)
    (order,) = core.take_effects()
    assert isinstance(order, LoadBlocks)
    # 14 tokens are 4 blocks; the first 2 (8 tokens) are in the cache of the request before.
    assert (order.first_block, len(ints(order.block_ids))) == (2, 2)


def test_a_full_local_hit_releases_the_ticket_and_loads_nothing() -> None:
    core = core_of(prefix_caching=True)
    core.add(request_of("warm", 9, max_tokens=1), 0.0)
    run_step(core)
    core.take_effects()
    core.add(request_of("a", 9, ticket=ticket_of(9)), 1.0)
    assert run_step(core, 1.0) == {"a": 1}
    effects = core.take_effects()
    assert effects[:2] == [HoldTicket("a", ticket_of(9)), ReleaseTicket("a", ticket_of(9))]


def test_a_one_token_prompt_is_computed() -> None:
    core = core_of()
    core.add(request_of("a", 1, ticket=ticket_of(1), max_tokens=1), 0.0)
    assert run_step(core) == {"a": 1}
    assert core.take_effects()[:2] == [HoldTicket("a", ticket_of(1)), ReleaseTicket("a", ticket_of(1))]
    assert core.live_request_ids() == []


@pytest.mark.parametrize("way_out", ["abort", "deadline"])
def test_whoever_leaves_before_the_load_releases_the_ticket_once(way_out: str) -> None:
    core = core_of(usable_blocks=3)
    core.add(request_of("holder", 9), 0.0)
    run_step(core)
    core.add(request_of("a", 10, ticket=ticket_of(10), deadline=5.0), 1.0)
    run_step(core, 1.0)
    core.take_effects()
    if way_out == "abort":
        core.abort("a", 2.0, "client left")
        core.abort("a", 2.0, "client left")
    core.expire(6.0)
    release, output = core.take_effects()
    assert release == ReleaseTicket("a", ticket_of(10))
    assert output.request_id == "a"


def test_a_request_that_can_never_run_ends_as_head_and_releases_its_ticket() -> None:
    core = core_of(usable_blocks=3)
    core.add(request_of("a", 13, ticket=ticket_of(13)), 0.0)
    assert run_step(core) == {}
    hold, release, output = core.take_effects()
    assert (hold, release) == (HoldTicket("a", ticket_of(13)), ReleaseTicket("a", ticket_of(13)))
    assert output == outputs_error("a", RefusalReason.EXCEEDS_KV_CAPACITY, output)


def outputs_error(request_id: str, reason: RefusalReason, output: object) -> object:
    assert (output.request_id, output.finish_reason, output.error) == (request_id, FinishReason.ERROR, reason.value)  # type: ignore[attr-defined]
    return output


def test_a_failed_load_is_computed_here_from_the_local_prefix_on() -> None:
    core, order = parked(usable_blocks=8, kv_load_failure_policy="recompute")
    core.apply(TransferFailed("a", order.generation, "checksum"), 3.0)
    assert core.has_runnable()
    assert run_step(core, 3.0) == {"a": 10}
    assert outputs(core)[0].num_cached_tokens == 0
    assert run_step(core, 3.0) == {"a": 1}
    assert core.num_free_blocks == 8


def test_policy_fail_ends_the_request_and_frees_its_blocks() -> None:
    core, order = parked(usable_blocks=8, kv_load_failure_policy="fail")
    core.apply(TransferFailed("a", order.generation, "expired", "lease 77 is gone"), 3.0)
    (output,) = outputs(core)
    assert (output.error, output.finish_reason) == ("kv_load_failed", FinishReason.ERROR)
    assert "expired (lease 77 is gone)" in (output.error_text or "")
    assert core.num_free_blocks == 8


def test_quarantined_blocks_stay_away_until_they_are_quiet() -> None:
    core, order = parked(usable_blocks=8, kv_load_failure_policy="recompute")
    core.apply(TransferFailed("a", order.generation, "deadline", quarantined=True), 3.0)
    core.check()
    plan = core.schedule(3.0)
    assert counts(plan) == {"a": 10}
    assert set(ints(plan.new_block_ids)).isdisjoint(ints(order.block_ids)), "it computes in other blocks"
    report = core.blocks_report(5.0)
    assert (report.quarantined, report.held, report.free) == (3, 3, 2)
    (grant,) = [grant for grant in report.grants if grant.state == "quarantined"]
    assert (grant.request_id, grant.generation, grant.blocks, grant.age_s) == ("a", order.generation, 3, 2.0)
    core.abort("a", 6.0)
    core.apply(BlocksQuiet("a", order.generation), 7.0)
    core.apply(BlocksQuiet("a", order.generation), 7.0)
    core.check()
    assert (core.num_free_blocks, core.stats().late_events_total) == (8, 1)


def test_a_failure_that_is_quiet_already_needs_no_quarantine() -> None:
    """The two reports of one READ may overtake each other: no second BlocksQuiet would ever free the blocks."""
    core, order = parked(usable_blocks=8, kv_load_failure_policy="recompute")
    core.apply(BlocksQuiet("a", order.generation), 3.0)
    core.check()
    assert core.num_free_blocks == 5, "it has not ended yet"
    core.apply(TransferFailed("a", order.generation, "deadline", quarantined=True), 4.0)
    core.check()
    assert (core.stats().blocks_quarantined, core.stats().late_events_total) == (0, 0)
    assert run_step(core, 4.0) == {"a": 10}
    core.abort("a", 5.0)
    assert core.num_free_blocks == 8


def test_quarantine_keeps_the_local_prefix_with_the_request() -> None:
    core = core_of(prefix_caching=True, usable_blocks=10, kv_load_failure_policy="recompute")
    core.add(request_of("warm", 9, max_tokens=1), 0.0)
    run_step(core)
    core.add(request_of("a", 14, ticket=ticket_of(14), max_tokens=1), 1.0)
    core.schedule(1.0)
    order = next(effect for effect in core.take_effects() if isinstance(effect, LoadBlocks))
    core.apply(TransferFailed("a", order.generation, "deadline", quarantined=True), 2.0)
    core.check()
    assert core.stats().blocks_quarantined == 2
    assert run_step(core, 2.0) == {"a": 6}, "14 tokens, 8 of them in the local prefix"


def test_an_abort_while_loading_cancels_once_and_holds_the_blocks_until_the_report() -> None:
    core, order = parked(usable_blocks=8)
    core.abort("a", 3.0, "client left")
    core.abort("a", 3.0)
    cancel, output = core.take_effects()
    assert cancel == CancelLoad("a", order.generation)
    assert output.finish_reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert core.num_free_blocks == 5
    core.add(request_of("a", 10, max_tokens=1), 4.0)  # the same id may come again meanwhile
    core.apply(BlocksLanded("a", order.generation), 5.0)
    core.check()
    assert core.num_free_blocks == 8
    assert run_step(core, 6.0) == {"a": 10}, "the late landing belongs to the older generation"


def test_cancelled_load_ends_in_quarantine_like_any_other() -> None:
    core, order = parked(usable_blocks=8)
    core.expire(30.0)
    core.apply(TransferFailed("a", order.generation, "cancelled", quarantined=True), 31.0)
    core.check()
    assert (core.num_free_blocks, core.stats().blocks_quarantined) == (5, 3)
    core.apply(BlocksQuiet("a", order.generation), 32.0)
    assert core.num_free_blocks == 8


def test_late_reports_are_counted_and_change_nothing() -> None:
    core, order = parked(usable_blocks=8)
    core.apply(BlocksLanded("a", order.generation + 1), 3.0)
    core.apply(BlocksLanded("b", order.generation), 3.0)
    assert (core.stats().late_events_total, core.has_runnable()) == (2, False)
    core.apply(BlocksLanded("a", order.generation), 3.0)
    core.apply(BlocksLanded("a", order.generation), 3.0)
    core.apply(TransferFailed("a", order.generation, "checksum"), 3.0)
    core.check()
    assert core.stats().late_events_total == 4
    assert run_step(core, 4.0) == {"a": 1}
