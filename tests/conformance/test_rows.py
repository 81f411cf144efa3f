"""Rows of the reference behaviour's part E, as far as a scenario cannot say them: block ids, tokens of drafts, calls.

Each test names its row; README.md here says which row is shown where. BS is the block size, N the number of blocks
including the null block. Where the row is marked as checked, its values were observed on the reference.
"""

from __future__ import annotations

import pytest

from actors.configuration import SchedulerConfiguration
from actors.messages.errors import RefusalReason
from actors.messages.plan import StepResult
from actors.messages.request import EngineRequest
from actors.messages.transfer import BlocksLanded, GrantLease, LeaseGranted, TransferOrder
from actors.scheduling.connector import NOTHING_REMOTE, RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.kv_events import AllBlocksCleared, BlockRemoved, BlocksStored
from actors.scheduling.kv_manager import KVManager
from actors.scheduling.orders import int32
from actors.scheduling.request import NO_EXTRAS, EncoderInput, RequestExtras, SchedulerRequest
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


def test_row_12_the_plan_names_the_encoder_outputs_that_were_evicted() -> None:
    """Budget, cache and T are 512: three prompts of 400 with 300 of an encoder's at 50."""
    core = core_of(block_size=16, max_num_batched_tokens=512, encoder_budget=512, encoder_cache=512, kv_connector=False)
    for place, name in enumerate(("r1", "r2", "r3")):
        core.add(request_of(name, 400, 1000 * place), 0.0, RequestExtras((EncoderInput(f"of {name}", 50, 300),)))
    first = core.schedule(0.0)
    assert (counts(first), first.dropped_encoder_outputs) == ({"r1": 400, "r2": 50, "r3": 50}, ())
    core.apply(result_of(first), 0.0)
    second = core.schedule(0.0)
    assert (counts(second), second.dropped_encoder_outputs) == ({"r1": 1, "r2": 350}, ("of r1",))
    assert [item.hash for item in core.last_step.encoder_runs["r2"]] == ["of r2"]
    assert [request.request_id for request in core.running] == ["r1", "r2", "r3"]
    core.apply(result_of(second), 0.0)
    assert core.schedule(0.0).dropped_encoder_outputs == ("of r2",), "each is named once"


@pytest.mark.parametrize(("whole", "chunks"), [(True, [200, 400]), (False, [512, 88])])
def test_row_13_an_encoder_input_is_computed_as_a_whole(whole: bool, chunks: list[int]) -> None:
    """T=512: a prompt of 600, 400 of them an encoder's from 200 on. The row's values, and those without the key."""
    core = core_of(
        block_size=16,
        max_num_batched_tokens=512,
        encoder_budget=512,
        encoder_cache=512,
        disable_chunked_mm_input=whole,
        kv_connector=False,
    )
    core.add(request_of("a", 600), 0.0, RequestExtras((EncoderInput("x", 200, 400),)))
    assert [run_step(core)["a"] for _ in chunks] == chunks


def test_row_13_an_encoder_input_longer_than_a_step_goes_in_parts() -> None:
    """T=8, the item at [9, 17). EAGLE looks at it from 8 on: there the reference waits for ever for a chunk of 9."""
    core = core_of(
        max_num_batched_tokens=8,
        encoder_budget=8,
        encoder_cache=8,
        drafter="eagle",
        num_spec_tokens=1,
        disable_chunked_mm_input=True,
        kv_connector=False,
    )
    core.add(request_of("a", 20), 0.0, RequestExtras((EncoderInput("x", 9, 8),)))
    assert [run_step(core)["a"] for _ in range(3)] == [8, 8, 4]


def test_row_24_a_request_larger_than_the_pool_does_not_hold_up_the_others() -> None:
    """N=11, BS=4: 60 tokens need 15 blocks of 10. The reference plans empty steps for ever."""
    core = core_of(usable_blocks=10, reserve_full_sequence=True, kv_connector=False)
    core.add(request_of("a", 60), 0.0)
    core.add(request_of("b", 4, 100), 0.0)
    assert run_step(core) == {"b": 4}
    (refused, first) = outputs(core)
    assert (refused.request_id, refused.error) == ("a", RefusalReason.EXCEEDS_KV_CAPACITY.value)
    assert (first.request_id, first.token_ids) == ("b", (7,))


@pytest.mark.parametrize(
    ("drafter", "num_blocks"), [("draft_model", [3, 3, 3, 4]), ("eagle", [3, 3, 3, 4]), ("ngram", [2, 2, 3, 3])]
)
def test_row_25_a_drafter_that_is_a_model_gets_slots_for_its_proposals(drafter: str, num_blocks: list[int]) -> None:
    """Lookahead 3, BS=4: 7 tokens take 3 blocks, the 8th none; two blocks are full then. n-gram looks nothing ahead."""
    core = core_of(num_spec_tokens=3, drafter=drafter, prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 7), 0.0)
    tables, registered = [], []
    for _ in range(4):
        run_step(core)
        request = core.live("a")
        assert request is not None
        tables.append(len(request.block_ids))
        registered.append(request.num_registered)
    assert tables == num_blocks
    assert registered == [1, 2, 2, 2]


def test_row_25_no_slots_beyond_the_context_and_none_for_a_load() -> None:
    """16 tokens of context are 4 blocks, although 14 + 4 would be 5. A load gets the blocks of what it loads."""
    keys = {"num_spec_tokens": 4, "drafter": "draft_model", "max_model_len": 16}
    core = core_of(**keys, kv_connector=False)
    core.add(request_of("a", 13), 0.0)
    for _ in range(2):
        run_step(core)
    assert len(table(core, "a")) == 4
    core = core_of(**keys)
    core.add(request_of("a", 8, ticket=ticket_of(8)), 0.0)
    core.schedule(0.0)
    assert len(table(core, "a")) == 2
    request = core.live("a")
    assert request is not None
    assert request.grant is not None
    core.apply(BlocksLanded("a", request.grant.generation), 1.0)
    core.schedule(1.0)
    assert len(table(core, "a")) == 3, "8 known and 4 ahead"


@pytest.mark.parametrize("chunk", [6, 64])
def test_row_25_a_pool_without_room_for_the_lookahead_ends_the_request(chunk: int) -> None:
    """4 blocks of 4: 14 tokens fit, 14 + 3 do not. Chunk by chunk it would begin, lose its blocks and begin again."""
    core = core_of(
        usable_blocks=4, max_num_batched_tokens=chunk, num_spec_tokens=3, drafter="eagle", kv_connector=False
    )
    core.add(request_of("a", 14), 0.0)
    for _ in range(6):
        run_step(core)
    (refused,) = outputs(core)
    assert (refused.request_id, refused.error) == ("a", RefusalReason.EXCEEDS_KV_CAPACITY.value)


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


@pytest.mark.parametrize(("drafter", "cached"), [("eagle", [8, 4]), ("draft_model", [12, 8])])
def test_row_48_eagle_computes_the_last_block_of_a_hit_again(drafter: str, cached: list[int]) -> None:
    """BS=4, 16 tokens known to the cache: of 13 and 12, EAGLE finds 8 and 4; another drafter 12 and 8."""
    core = core_of(num_spec_tokens=1, drafter=drafter, prefix_caching=True, kv_connector=False)
    core.add(request_of("warm", 16, max_tokens=1), 0.0)
    run_step(core)
    found = []
    for length in (13, 12):
        core.add(request_of(f"of {length}", length, max_tokens=1), 0.0)
        run_step(core)
        found.append(core.last_step.cached[f"of {length}"])
    assert found == cached


def test_row_49_an_encoder_input_isolates_only_the_blocks_that_it_touches() -> None:
    """BS=4, the item at [5, 8): its request hits the first block of one that is all text."""
    core = core_of(prefix_caching=True, encoder_budget=8, encoder_cache=8, kv_connector=False)
    core.add(request_of("text", 9, max_tokens=1), 0.0)
    run_step(core)
    core.add(request_of("picture", 9, max_tokens=1), 0.0, RequestExtras((EncoderInput("x", 5, 3),)))
    assert run_step(core) == {"picture": 5}
    assert core.last_step.cached == {"picture": 4}


def test_row_50_prompt_log_probabilities_need_the_whole_prompt_computed() -> None:
    """BS=4, 8 tokens: nothing is hit, though the cache knows both blocks. What is computed is registered, too."""
    core = core_of(usable_blocks=9, prefix_caching=True, kv_connector=False)
    core.add(request_of("warm", 8, max_tokens=1), 0.0)
    run_step(core)
    core.add(request_of("a", 8), 0.0, RequestExtras(prompt_logprobs=True))
    assert run_step(core) == {"a": 8}
    assert core.last_step.cached == {}
    entries = core._state.kv.cache.entries
    assert sorted(entry.blocks for entry in entries.values()) == [[1, 3], [2, 4]]


def test_row_51_what_the_prefix_cache_says_of_itself() -> None:
    """N=4, BS=4: 12 tokens; they are free; 9 other tokens take all 3 blocks."""
    core = core_of(usable_blocks=3, prefix_caching=True, kv_events=True, kv_connector=False)
    core.add(request_of("a", 12, max_tokens=1), 0.0)
    run_step(core)
    (stored,) = core.take_kv_events()
    assert isinstance(stored, BlocksStored)
    assert (len(stored.block_hashes), stored.parent_hash, stored.token_ids) == (3, None, tuple(range(12)))
    core.add(request_of("b", 9, 100, max_tokens=1), 0.0)
    run_step(core)
    *removed, other = core.take_kv_events()
    first, second, third = stored.block_hashes
    assert removed == [BlockRemoved(third), BlockRemoved(second), BlockRemoved(first)], "the tail goes first"
    assert isinstance(other, BlocksStored)
    assert (len(other.block_hashes), other.token_ids) == (2, tuple(range(100, 108)))
    assert core.reset_prefix_cache(0.0)
    assert core.take_kv_events() == [AllBlocksCleared()]
    assert core.take_kv_events() == []


def test_row_52_the_second_table_begins_with_the_blocks_of_the_first() -> None:
    core = core_of(usable_blocks=99, block_size=16, prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 70), 0.0)
    core.add(request_of("b", 70), 0.0)
    assert counts(core.schedule(0.0)) == {"a": 70, "b": 6}
    assert table(core, "a") == [1, 2, 3, 4, 5]
    assert table(core, "b") == [1, 2, 3, 4, 6]
    assert core.num_free_blocks == 93
    assert core.num_common_prefix_blocks == 4
    core.add(request_of("c", 20, 500), 0.0)
    core.schedule(0.0)
    assert core.num_common_prefix_blocks == 0, "c shares nothing"


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
