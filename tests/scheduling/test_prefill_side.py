"""A request for a remote decode: its prompt's blocks under a lease, its answer held back until the ticket is there."""

from __future__ import annotations

import msgspec

from actors.messages.lease import prompt_digest
from actors.messages.request import FinishReason, RequestOutput
from actors.messages.transfer import BlocksSent, GrantLease, LeaseDenied, LeaseExpired, LeaseGranted, RevokeLease
from actors.scheduling.core import SchedulerCore
from tests.scheduling.builders import core_of, outputs, request_of, run_step, ticket_of
from tests.scheduling.simulated import ints


def computed(length: int = 8, max_tokens: int = 1, deadline: float = float("inf")) -> tuple[SchedulerCore, GrantLease]:
    core = core_of(usable_blocks=8)
    request = request_of("a", length, max_tokens=max_tokens, do_remote_decode=True, deadline=deadline)
    core.add(request, 0.0)
    for _ in range(max_tokens):
        run_step(core, 1.0)
    order = core.take_effects()[-1]
    assert isinstance(order, GrantLease)
    return core, order


def test_the_answer_waits_for_the_ticket() -> None:
    core, order = computed()
    assert (ints(order.block_ids), order.num_tokens) == ([1, 2], 8)
    assert order.prompt_digest == prompt_digest(tuple(range(8)))
    assert core.live_request_ids() == ["a"]
    assert core.stats().blocks_leased == 2
    assert not core.has_runnable()
    core.apply(LeaseGranted("a", order.generation, ticket_of(8)), 3.0)
    (output,) = outputs(core)
    assert (output.finish_reason, output.ticket, output.token_ids) == (FinishReason.LENGTH, ticket_of(8), (7,))
    assert [(part.reason, part.start, part.end) for part in output.story] == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 1.0),
        ("decode", 1.0, 1.0),
        ("granting_lease", 1.0, 3.0),
    ]
    assert core.num_free_blocks == 6
    core.apply(BlocksSent("a", order.generation), 4.0)
    core.apply(LeaseExpired("a", order.generation), 5.0)
    core.check()
    assert (core.num_free_blocks, core.stats().late_events_total) == (8, 1), "freed by the first of the two"


def test_only_the_prompts_blocks_are_leased() -> None:
    # 7 + 3 tokens: the last output has no KV yet, so 9 tokens in 3 blocks; the prompt's are the first 2.
    core, order = computed(length=7, max_tokens=3)
    assert (len(ints(order.block_ids)), order.num_tokens) == (2, 7)
    assert core.num_free_blocks == 6
    core.check()


def test_a_denied_lease_is_an_error_and_frees_the_blocks() -> None:
    core, order = computed()
    core.apply(LeaseDenied("a", order.generation, "too many leases"), 3.0)
    (output,) = outputs(core)
    assert (output.error, output.ticket) == ("kv_send_failed", None)
    assert "too many leases" in (output.error_text or "")
    assert core.num_free_blocks == 8


def test_an_abort_while_the_lease_is_granted_revokes_it_once() -> None:
    core, order = computed()
    core.abort("a", 2.0)
    core.abort("a", 2.0)
    revoke, output = core.take_effects()
    assert revoke == RevokeLease("a", order.generation)
    assert isinstance(output, RequestOutput)
    assert output.finish_reason is FinishReason.ABORT
    core.apply(LeaseGranted("a", order.generation, ticket_of(8)), 3.0)
    assert core.take_effects() == []
    assert core.num_free_blocks == 6, "leased until the owner says that the lease has ended"
    core.apply(LeaseExpired("a", order.generation), 4.0)
    core.check()
    assert core.num_free_blocks == 8


def test_an_abort_while_the_lease_is_granted_and_then_denied_leaves_nothing_behind() -> None:
    core, order = computed()
    core.abort("a", 2.0)
    core.take_effects()
    core.apply(LeaseDenied("a", order.generation, "too many leases"), 3.0)
    core.check()
    assert core.take_effects() == [], "its client has its answer"
    assert (core.num_free_blocks, core.stats().late_events_total) == (8, 0)
    core.apply(LeaseDenied("a", order.generation, "too many leases"), 3.0)
    assert core.stats().late_events_total == 1


def test_an_abort_before_the_answer_has_left_takes_the_ticket_back() -> None:
    core, order = computed()
    core.apply(LeaseGranted("a", order.generation, ticket_of(8)), 3.0)
    core.abort("a", 3.0)
    core.abort("a", 3.0)
    output, revoke = core.take_effects()
    assert isinstance(output, RequestOutput)
    assert (output.finish_reason, output.ticket) == (FinishReason.ABORT, None)
    assert revoke == RevokeLease("a", order.generation)


def test_an_abort_after_the_answer_has_left_is_ignored() -> None:
    core, order = computed()
    core.apply(LeaseGranted("a", order.generation, ticket_of(8)), 3.0)
    core.take_effects()
    core.abort("a", 4.0)
    assert core.take_effects() == []


def test_the_deadline_while_the_lease_is_granted() -> None:
    core, order = computed(deadline=5.0)
    core.expire(5.0)
    revoke, output = core.take_effects()
    assert revoke == RevokeLease("a", order.generation)
    assert isinstance(output, RequestOutput)
    assert output.error == "deadline_exceeded"


def test_a_lease_that_ends_before_its_grant_is_heard_of_frees_once() -> None:
    core, order = computed()
    core.apply(LeaseExpired("a", order.generation), 2.0)
    core.check()
    assert core.num_free_blocks == 8
    core.apply(LeaseGranted("a", order.generation, ticket_of(8)), 3.0)
    core.check()
    (output,) = outputs(core)
    assert output.ticket == ticket_of(8), "the reader is told by the lease's owner"
    assert core.live_request_ids() == []


def test_an_aborted_prefill_keeps_nothing() -> None:
    core = core_of(usable_blocks=8)
    core.add(request_of("a", 8, max_tokens=4, do_remote_decode=True), 0.0)
    run_step(core)
    core.abort("a", 1.0)
    assert not any(isinstance(effect, GrantLease) for effect in core.take_effects())
    assert core.num_free_blocks == 8


def test_without_a_connector_a_remote_decode_is_refused() -> None:
    core = core_of(kv_connector=False)
    core.add(request_of("a", 8, do_remote_decode=True), 0.0)
    (output,) = outputs(core)
    assert output.error == "invalid_request"
    assert msgspec.structs.asdict(output)["ticket"] is None
