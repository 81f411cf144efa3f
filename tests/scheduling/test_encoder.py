"""The encoder cache: what stays, what goes first, and what has to be computed again."""

from __future__ import annotations

from actors.messages.errors import RefusalReason
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import EncoderInput, RequestExtras
from tests.scheduling.builders import core_of, outputs, request_of, run_step


def run_alone(core: SchedulerCore, request_id: str, item_hash: str) -> list[str]:
    """A prompt of 6 tokens, 4 of them the item's, computed in one step that also ends it. The items it had to run."""
    core.add(request_of(request_id, 6, max_tokens=1), 0.0, RequestExtras((EncoderInput(item_hash, 0, 4),)))
    assert run_step(core) == {request_id: 6}
    return [item.hash for item in core.last_step.encoder_runs.get(request_id, [])]


def test_the_output_that_was_let_go_first_is_evicted_first() -> None:
    """A cache of 8 tokens holds two items of 4. The third takes the first one's place, the second stays."""
    core = core_of(kv_connector=False, encoder_budget=4, encoder_cache=8)
    assert [run_alone(core, f"r{place}", item) for place, item in enumerate("xyz")] == [["x"], ["y"], ["z"]]
    assert run_alone(core, "r3", "y") == []
    assert run_alone(core, "r4", "x") == ["x"]


def test_an_output_that_is_used_again_is_the_newest() -> None:
    core = core_of(kv_connector=False, encoder_budget=4, encoder_cache=8)
    assert [run_alone(core, f"r{place}", item) for place, item in enumerate("xyx")] == [["x"], ["y"], []]
    assert run_alone(core, "r3", "z") == ["z"]
    assert [run_alone(core, "r4", "x"), run_alone(core, "r5", "y")] == [[], ["y"]], "z took y's place"


# EAGLE's drafter embeds one token more than the target. The chunks were observed on the reference.


def eagle_chunks(items: list[tuple[int, int]], *, budget: int, num_steps: int) -> list[tuple[int, list[int]]]:
    """20 tokens with encoder inputs at (offset, length), a cache of 8: the chunks, and what each had to run."""
    core = core_of(
        kv_connector=False,
        max_num_batched_tokens=budget,
        encoder_budget=64,
        encoder_cache=8,
        drafter="eagle",
        num_spec_tokens=1,
    )
    inputs = tuple(EncoderInput(f"at {offset}", offset, length) for offset, length in items)
    core.add(request_of("a", 20), 0.0, RequestExtras(inputs))
    chunks = []
    for _ in range(num_steps):
        count = run_step(core)["a"]
        chunks.append((count, [item.offset for item in core.last_step.encoder_runs.get("a", ())]))
    return chunks


def test_eagle_needs_room_for_an_input_one_position_ahead() -> None:
    """The one at 8 has no room beside the one at 1, and a chunk that ends at 8 would embed it: it ends at 7."""
    assert eagle_chunks([(1, 5), (8, 8)], budget=8, num_steps=3) == [(7, [1]), (8, [8]), (5, [])]


def test_eagle_does_not_run_an_input_that_only_its_drafter_would_see() -> None:
    assert eagle_chunks([(8, 8)], budget=8, num_steps=3) == [(8, []), (8, [8]), (4, [])]


def test_eagle_keeps_an_output_for_one_position_more() -> None:
    for budget, held in ((10, True), (11, False)):
        core = core_of(
            kv_connector=False,
            max_num_batched_tokens=budget,
            encoder_budget=8,
            encoder_cache=8,
            drafter="eagle",
            num_spec_tokens=1,
        )
        core.add(request_of("a", 30), 0.0, RequestExtras((EncoderInput("x", 2, 8),)))
        assert run_step(core) == {"a": budget}
        assert core.holds_encoder_output("a", "x") is held


def test_eagle_with_neighbours_that_the_cache_cannot_hold_together_ends() -> None:
    """F18: the reference stops at 9 for ever, where the first is still needed and the second already is."""
    core = core_of(kv_connector=False, encoder_budget=64, encoder_cache=8, drafter="eagle", num_spec_tokens=1)
    core.add(request_of("a", 20), 0.0, RequestExtras((EncoderInput("x", 2, 8), EncoderInput("y", 10, 8))))
    assert run_step(core) == {"a": 9}
    assert run_step(core) == {}
    (refused,) = outputs(core)
    assert refused.error == RefusalReason.INVALID_REQUEST
