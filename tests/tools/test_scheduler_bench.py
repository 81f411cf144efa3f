"""The benchmark's face on the scheduler core does what a benchmark counts on."""

from __future__ import annotations

from tools.scheduler_bench import make


def test_requests_run_to_their_last_token() -> None:
    bench = make({"block_size": 4, "max_num_batched_tokens": 8, "prefix_caching": True, "usable_blocks": 8})
    bench.add(
        [{"id": "a", "prompt": [1, 2, 3, 4, 5], "max_tokens": 2}, {"id": "b", "prompt": [6] * 5, "max_tokens": 1}]
    )
    steps = []
    for _ in range(3):
        plan = bench.schedule()
        steps.append(bench.scheduled(plan))
        bench.update(plan, bench.results(plan))
    assert steps == [{"a": 5, "b": 3}, {"a": 1, "b": 2}, {}], "8 tokens a step; a's second token is its last"


def test_a_request_is_no_longer_than_the_budget_unless_the_configuration_says_so() -> None:
    bench = make({"max_num_batched_tokens": 8})
    bench.add([{"id": "a", "prompt": [1] * 8, "max_tokens": 1}, {"id": "b", "prompt": [1] * 7, "max_tokens": 1}])
    assert bench.scheduled(bench.schedule()) == {"b": 7}, "a's prompt leaves no room for an answer"
