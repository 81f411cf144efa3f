"""The encoder cache: what stays, what goes first, and what has to be computed again."""

from __future__ import annotations

from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import EncoderInput, RequestExtras
from tests.scheduling.builders import core_of, request_of, run_step


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
