"""Rows of the reference behaviour's part E, as far as a scenario cannot say them: block ids, tokens of drafts, calls.

Each test names its row; README.md here says which row is shown where. BS is the block size, N the number of blocks
including the null block. Where the row is marked as checked, its values were observed on the reference.
"""

from __future__ import annotations

from actors.configuration import SchedulerConfiguration
from actors.messages.errors import RefusalReason
from actors.messages.plan import StepResult
from actors.messages.request import EngineRequest
from actors.messages.transfer import BlocksLanded, GrantLease, LeaseGranted, TransferOrder
from actors.scheduling.connector import NOTHING_REMOTE, RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.kv_manager import KVManager
from actors.scheduling.orders import int32
from actors.scheduling.request import NO_EXTRAS, SchedulerRequest
from tests.scheduling.builders import core_of, counts, outputs, request_of, result_of, run_step, ticket_of
from tests.scheduling.simulated import ints


class ScriptedConnector:
    """Gives its answers one after the other and notes what it was asked."""

    def __init__(self, *answers: RemoteMatch | None) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, int]] = []

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        if request.request_id != "a":
            return NOTHING_REMOTE
        self.calls.append(("matched", request.request_id, num_local_tokens))
        return self.answers.pop(0)

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        self.calls.append(("order_load", request.request_id, len(request.block_ids)))
        return None

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        return 0


def table(core: SchedulerCore, request_id: str) -> list[int]:
    request = core.live(request_id)
    assert request is not None
    return request.block_ids


def free_list(core: SchedulerCore) -> list[int]:
    return list(core._state.kv.pool.free_blocks())


def test_row_05_and_07_the_drafts_that_are_scheduled() -> None:
    core = core_of(max_model_len=20, num_spec_tokens=4)
    core.add(request_of("a", 16, max_tokens=99), 0.0)
    run_step(core)
    core.set_drafts("a", [1, 2, 3, 4])
    core.schedule(0.0)
    assert core.last_step.drafts == {"a": [1, 2]}

    core = core_of(max_num_batched_tokens=6, max_model_len=64, num_spec_tokens=3)
    core.add(request_of("a", 2), 0.0)
    core.add(request_of("b", 2, 100), 0.0)
    run_step(core)
    core.set_drafts("a", [1, 2, 3])
    core.set_drafts("b", [4, 5, 6])
    assert counts(core.schedule(0.0)) == {"a": 4, "b": 2}
    assert core.last_step.drafts == {"a": [1, 2, 3], "b": [4]}


def test_row_08_the_stop_reason_is_the_stop_id() -> None:
    core = core_of(kv_connector=False)
    core.add(request_of("a", 4, max_tokens=99, min_tokens=3, eos_token_ids=(2,), stop_token_ids=(42,)), 0.0)
    for token in (42, 2, 7, 42):
        run_step(core, token=token)
    told = [(output.token_ids, output.finish_reason, output.stop_token_id) for output in outputs(core)]
    assert told == [((42,), None, None), ((2,), None, None), ((7,), None, None), ((42,), "stop", 42)]


def test_row_24_a_request_larger_than_the_pool_does_not_hold_up_the_others() -> None:
    """N=11, BS=4: 60 tokens need 15 blocks of 10. The reference plans empty steps for ever."""
    core = core_of(usable_blocks=10, reserve_full_sequence=True, kv_connector=False)
    core.add(request_of("a", 60), 0.0)
    core.add(request_of("b", 4, 100), 0.0)
    assert run_step(core) == {"b": 4}
    (refused, first) = outputs(core)
    assert (refused.request_id, refused.error) == ("a", RefusalReason.EXCEEDS_KV_CAPACITY.value)
    assert (first.request_id, first.token_ids) == ("b", (7,))


def test_row_31_what_a_pause_leaves_to_do() -> None:
    core = core_of(kv_connector=False)
    core.add(request_of("a", 10), 0.0)
    run_step(core)
    core.pause("new")
    core.add(request_of("b", 10, 100), 0.0)
    assert core.has_runnable(), "a goes on"
    assert run_step(core) == {"a": 1}
    core.pause("all")
    assert not core.has_runnable()
    core.pause("none")
    assert core.has_runnable()
    assert run_step(core) == {"a": 1, "b": 10}


def test_row_32_the_plan_after_a_forced_reset_tells_the_worker_whom_to_forget() -> None:
    core = core_of(block_size=16, prefix_caching=True, kv_connector=False)
    for place, name in enumerate("abc"):
        core.add(request_of(name, 20, 100 * place), 0.0)
    run_step(core)
    assert core.reset_prefix_cache(0.0, preempt_running=True)
    plan = core.schedule(0.0)
    assert counts(plan) == {"a": 21, "b": 21, "c": 21}
    assert sorted(plan.dropped_request_ids) == ["a", "b", "c"]
    assert [new.request_id for new in plan.new_requests] == ["a", "b", "c"]


def test_row_42_a_frame_without_tokens_was_for_nothing() -> None:
    """K=3, 5 known. The reference leaves computed at 8 and trips over it (O1); computed is known - 1 again."""
    core = core_of(num_spec_tokens=3, kv_connector=False)
    core.add(request_of("a", 4), 0.0)
    run_step(core)
    core.set_drafts("a", [1, 2, 3])
    plan = core.schedule(0.0)
    assert counts(plan) == {"a": 4}
    core.apply(StepResult(plan.step, int32([0]), b""), 0.0)
    core.check()
    request = core.live("a")
    assert request is not None
    assert (request.num_computed_tokens, len(request.tokens)) == (4, 5)
    assert run_step(core) == {"a": 1}


def test_row_46_equal_prompts_keep_blocks_of_their_own() -> None:
    core = core_of(usable_blocks=9, prefix_caching=True, kv_connector=False)
    core.add(request_of("first", 8, max_tokens=1), 0.0)
    run_step(core)
    core.add(request_of("second", 8, max_tokens=2), 0.0)
    plan = core.schedule(0.0)
    assert core.last_step.cached == {"second": 4}, "the last token has to be computed, so its block is no hit"
    assert table(core, "second") == [1, 3]
    entries = core._state.kv.cache.entries
    assert sorted(entry.blocks for entry in entries.values()) == [[1], [2, 3]]
    core.apply(result_of(plan), 0.0)
    core.abort("second", 0.0)
    assert free_list(core)[-3:] == [2, 3, 1]


def test_row_47_a_refused_admission_changes_nothing() -> None:
    """N=8, BS=4: 12 cached tokens are free, z holds 2 blocks; 3 hits and 3 new blocks do not fit, 3 and 2 do."""
    kv = KVManager(SchedulerConfiguration(usable_blocks=7, block_size=4, prefix_caching=True))
    warm, z, q = (
        SchedulerRequest(request_of(name, length, first), NO_EXTRAS, 0.0)
        for name, length, first in (("warm", 12, 0), ("z", 8, 100), ("q", 24, 0))
    )
    for request, num_tokens in ((warm, 12), (z, 8)):
        assert kv.admit(request, num_tokens, [], 0.0, spare=0, reserved=0)
    kv.register(warm, 12)
    assert warm.grant is not None
    kv.ledger.release(warm.grant)
    free = [6, 7, 3, 2, 1]
    assert list(kv.pool.free_blocks()) == free
    hits = kv.lookup(q)
    assert hits == [1, 2, 3]
    assert not kv.admit(q, 24, hits, 0.0, spare=0, reserved=0)
    assert (list(kv.pool.free_blocks()), kv.pool.ref_counts[1:]) == (free, [0, 0, 0, 1, 1, 0, 0])
    assert kv.admit(q, 20, hits, 0.0, spare=0, reserved=0)
    assert q.block_ids == [1, 2, 3, 6, 7]


def test_row_52_the_second_table_begins_with_the_blocks_of_the_first() -> None:
    core = core_of(usable_blocks=99, block_size=16, prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 70), 0.0)
    core.add(request_of("b", 70), 0.0)
    assert counts(core.schedule(0.0)) == {"a": 70, "b": 6}
    assert table(core, "a") == [1, 2, 3, 4, 5]
    assert table(core, "b") == [1, 2, 3, 4, 6]
    assert core.num_free_blocks == 93


def test_row_55_one_question_and_one_load() -> None:
    """BS=16, 37 tokens, all remote. The reference tells its connector of the second allocation, too; ours needs not."""
    connector = ScriptedConnector(RemoteMatch(37, is_async=True))
    core = SchedulerCore(SchedulerConfiguration(usable_blocks=19, prefix_caching=True, kv_connector=True), connector)
    core.add(request_of("a", 37), 0.0)
    core.schedule(0.0)
    request = core.live("a")
    assert request is not None
    assert (request.num_registered, core.num_free_blocks) == (0, 16)
    assert request.grant is not None
    core.apply(BlocksLanded("a", request.grant.generation), 1.0)
    plan = core.schedule(1.0)
    assert (counts(plan), ints(plan.num_computed_tokens)) == ({"a": 1}, [36])
    assert request.num_registered == 2
    assert connector.calls == [("matched", "a", 0), ("order_load", "a", 3)]


def test_row_57_an_undecided_connector_is_asked_again() -> None:
    connector = ScriptedConnector(None, RemoteMatch(24))
    config = SchedulerConfiguration(block_size=8, max_num_batched_tokens=30, prefix_caching=True, kv_connector=True)
    core = SchedulerCore(config, connector)
    core.add(request_of("a", 40), 0.0)
    core.add(request_of("b", 10, 100), 0.0)
    assert run_step(core) == {"b": 10}
    request = core.live("a")
    assert request is not None
    assert request.block_ids == []
    assert run_step(core) == {"b": 1, "a": 16}
    assert (len(request.block_ids), request.num_registered) == (5, 5)
    assert connector.calls == [("matched", "a", 0), ("matched", "a", 0)]


def test_row_59_the_answer_carries_the_ticket_and_a_later_abort_is_ignored() -> None:
    """N=20, BS=16: 37 tokens are 3 blocks."""
    core = core_of(usable_blocks=19, block_size=16)
    core.add(EngineRequest("a", tuple(range(37)), max_tokens=1, do_remote_decode=True), 0.0)
    run_step(core)
    (order,) = core.take_effects()
    assert isinstance(order, GrantLease)
    ticket = ticket_of(37)
    core.apply(LeaseGranted("a", order.generation, ticket), 1.0)
    (output,) = outputs(core)
    assert (output.finish_reason, output.ticket, core.num_free_blocks) == ("length", ticket, 16)
    core.abort("a", 2.0)
    assert core.take_effects() == []
    assert core.num_free_blocks == 16
