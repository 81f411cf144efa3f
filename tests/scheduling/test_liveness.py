"""Waiting that would be for ever, and how it ends: who is passed over, who lets others go first, who is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    GrantLease,
    LoadBlocks,
    TransferFailed,
    TransferReport,
)
from actors.scheduling.core import SchedulerCore
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step, ticket_of


def generation_of_order(core: SchedulerCore, kind: type[LoadBlocks | GrantLease]) -> int:
    (order,) = [effect for effect in core.take_effects() if isinstance(effect, kind)]
    return order.generation


def test_who_starved_lets_the_holder_of_its_blocks_go_first() -> None:
    """6 blocks of 4 tokens, 4 tokens a step. b has loaded its 12 tokens: it holds 3 blocks and lacks one token.

    a is more important and its 20 tokens take the whole of each step, until it needs its fourth block. Admitted chunk
    by chunk again it would come as far as before, preempt itself, and so for ever: b would never get a token.
    """
    core = core_of(usable_blocks=6, max_num_batched_tokens=4, policy="priority", kv_load_failure_policy="recompute")
    core.add(request_of("b", 12, 100, ticket=ticket_of(12, 100), priority=5, max_tokens=1), 0.0)
    core.schedule(0.0)
    core.apply(BlocksLanded("b", generation_of_order(core, LoadBlocks)), 0.0)
    core.add(request_of("a", 20, priority=0, max_tokens=1), 0.0)
    assert [run_step(core) for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 4}, {}]
    assert core.last_step.preempted == ["a"]
    assert run_step(core) == {"b": 1, "a": 3}
    assert [run_step(core) for _ in range(5)] == [*[{"a": 4}] * 4, {"a": 1}]
    assert [output.request_id for output in outputs(core)] == ["b", "a"]


def test_a_lone_token_that_its_padding_would_carry_past_the_context_is_a_stop() -> None:
    """Beside decodes with drafts a lone last token is padded with K = 4 empty ones: 8 hit + 5 > 12, 8 + 5 fit in 13.

    Nobody behind it is tried either. Once no decode runs it needs no padding.
    """
    scheduled = {}
    for max_model_len in (12, 13):
        core = core_of(num_spec_tokens=4, max_model_len=max_model_len, prefix_caching=True, kv_connector=False)
        core.add(request_of("warm", 9, max_tokens=1), 0.0)
        run_step(core)
        core.add(request_of("decodes", 2, 100, max_tokens=3), 0.0)
        run_step(core)
        core.add(request_of("a", 9, max_tokens=1), 0.0)
        core.add(request_of("behind", 2, 200, max_tokens=1), 0.0)
        scheduled[max_model_len] = [run_step(core) for _ in range(3)]
    assert scheduled[12] == [{"decodes": 1}, {"decodes": 1}, {"a": 1, "behind": 2}]
    assert scheduled[13] == [{"decodes": 1, "a": 5, "behind": 2}, {"decodes": 1}, {}]


def leased() -> tuple[SchedulerCore, list[TransferReport]]:
    core = core_of(usable_blocks=3)
    core.add(request_of("a", 8, max_tokens=1, do_remote_decode=True), 0.0)
    assert run_step(core) == {"a": 8}
    return core, [BlocksSent("a", generation_of_order(core, GrantLease))]


def loading(policy: str) -> tuple[SchedulerCore, int]:
    core = core_of(usable_blocks=3, kv_load_failure_policy=policy)
    core.add(request_of("a", 8, ticket=ticket_of(8), max_tokens=1), 0.0)
    core.schedule(0.0)
    return core, generation_of_order(core, LoadBlocks)


def cancelled() -> tuple[SchedulerCore, list[TransferReport]]:
    core, generation = loading("recompute")
    core.abort("a", 0.0)
    return core, [BlocksLanded("a", generation)]


def quarantined() -> tuple[SchedulerCore, list[TransferReport]]:
    core, generation = loading("fail")
    core.apply(TransferFailed("a", generation, "deadline", quarantined=True), 0.0)
    assert core.stats().blocks_quarantined == 2
    return core, [BlocksQuiet("a", generation)]


@pytest.mark.parametrize("blocks", [leased, cancelled, quarantined])
def test_the_head_is_not_failed_while_blocks_may_come_back(
    blocks: Callable[[], tuple[SchedulerCore, list[TransferReport]]],
) -> None:
    """2 of 3 blocks are a reader's, a cancelled load's, a failed one's: the head, which needs 3, waits for them."""
    core, reports = blocks()
    core.take_effects()
    core.add(request_of("head", 12, 100, max_tokens=1), 1.0)
    assert [run_step(core, 1.0) for _ in range(3)] == [{}, {}, {}]
    assert "head" in core.live_request_ids()
    for report in reports:
        core.apply(report, 2.0)
    outputs(core)
    assert run_step(core, 2.0) == {"head": 12}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_head_is_not_failed_while_a_load_may_yet_free_what_it_holds(policy: str) -> None:
    core, generation = loading(policy)
    core.add(request_of("head", 12, 100, max_tokens=1), 1.0)
    assert [run_step(core, 1.0) for _ in range(3)] == [{}, {}, {}]
    assert outputs(core) == []
    core.apply(BlocksLanded("a", generation), 2.0)
    assert [run_step(core, 2.0), run_step(core, 2.0)] == [{"a": 1}, {"head": 12}]


def test_the_head_is_not_failed_while_its_blocks_are_fenced() -> None:
    core = core_of(usable_blocks=3, fence_frees=True, kv_connector=False)
    core.add(request_of("a", 8), 0.0)
    plan = core.schedule(0.0)
    core.abort("a", 0.0)
    core.add(request_of("head", 12, 100, max_tokens=1), 0.0)
    core.take_effects()
    assert counts(core.schedule(0.0)) == {}
    assert outputs(core) == []
    core.apply(result_of(plan), 1.0)
    assert run_step(core, 1.0) == {"head": 12}
