"""A load that is part of the step (not asynchronous) and failed: the step's result says which blocks are bad."""

from __future__ import annotations

import pytest

from actors.configuration import SchedulerConfiguration
from actors.messages.request import FinishReason
from actors.messages.transfer import TransferOrder
from actors.scheduling.connector import NOTHING_REMOTE, RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import SchedulerRequest
from tests.scheduling.builders import ROBUST, counts, outputs, request_of, result_of, run_step


class LoadsInTheStep:
    """The first 8 tokens of `a` lie elsewhere and are loaded by the step that admits it. Of others, none."""

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        return RemoteMatch(8 - num_local_tokens) if request.request_id == "a" else NOTHING_REMOTE

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        raise AssertionError("nothing is loaded beside the steps")

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        return 0


def admitted(policy: str, **config: object) -> SchedulerCore:
    """`a`, of 10 tokens in blocks of 4, is in a step that loads 8 and computes 2."""
    everything = {"block_size": 4, "usable_blocks": 8, "prefix_caching": True, "kv_connector": True, **ROBUST, **config}
    core = SchedulerCore(SchedulerConfiguration(kv_load_failure_policy=policy, **everything), LoadsInTheStep())  # type: ignore[arg-type]
    core.add(request_of("a", 10, max_tokens=2), 0.0)
    return core


def test_what_was_loaded_counts_as_cached() -> None:
    core = admitted("recompute")
    assert run_step(core) == {"a": 2}
    assert [(output.token_ids, output.num_cached_tokens) for output in outputs(core)] == [((7,), 8)]


@pytest.mark.parametrize(("bad", "num_left"), [(1, 4), (0, 0)])
def test_recompute_goes_on_before_the_first_bad_block(bad: int, num_left: int) -> None:
    """Nor were more tokens than that cached: what failed is computed here."""
    core = admitted("recompute")
    plan = core.schedule(0.0)
    core.apply_step(result_of(plan, token=666), {"a": [bad]}, 0.0)
    core.check()
    assert outputs(core) == [], "its token was computed from what is not there"
    assert run_step(core) == {"a": 10 - num_left}
    assert [(output.token_ids, output.num_cached_tokens) for output in outputs(core)] == [((7,), num_left)]


def test_fail_ends_the_request_and_nobody_hits_what_was_never_written() -> None:
    """The second of two blocks is bad: of the same prompt only the first one's 4 tokens are found afterwards."""
    core = admitted("fail")
    plan = core.schedule(0.0)
    core.apply_step(result_of(plan, token=666), {"a": [1]}, 0.0)
    core.check()
    (error,) = outputs(core)
    assert (error.request_id, error.finish_reason, error.error) == ("a", FinishReason.ERROR, "kv_load_failed")
    assert core.num_free_blocks == 8
    core.add(request_of("b", 10, max_tokens=1), 1.0)
    plan = core.schedule(1.0)
    assert (counts(plan), core.last_step.cached) == ({"b": 6}, {"b": 4})
