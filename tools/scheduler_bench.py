"""The scheduler core behind the face that a scheduler benchmark drives: what an engine does per step, and no more.

`make(config)` takes the keys of the scenario format. Per step: `schedule`, `apply` of the result, `take_effects`.
Needs the standard library, msgspec and numpy alone, so that it runs in another engine's Python. How to measure with it:
docs/conformance.md. As a command it measures decode steps of kvyard alone: `python -m tools.scheduler_bench`.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32

_TOKEN = 7
_PROMPT = 4  # tokens: so short that 4,096 requests are decoding after a few steps of 8,192 tokens


class SchedulerBench:
    def __init__(self, configuration: SchedulerConfiguration) -> None:
        self._core = SchedulerCore(configuration)
        self._num_added = 0

    def add(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Each has "id", "prompt" (token ids) and "max_tokens"."""
        for request in requests:
            self._core.add(
                EngineRequest(
                    request["id"],
                    tuple(request["prompt"]),
                    max_tokens=request["max_tokens"],
                    arrival=float(self._num_added),
                ),
                0.0,
            )
            self._num_added += 1

    def schedule(self) -> StepPlan:
        return self._core.schedule(0.0)

    def scheduled(self, plan: StepPlan) -> dict[str, int]:
        return dict(zip(plan.request_ids, array("i", plan.num_scheduled_tokens), strict=True))

    def results(self, plan: StepPlan) -> StepResult:
        num_sampled = array("i", plan.num_sampled)
        return StepResult(plan.step, plan.num_sampled, int32([_TOKEN] * sum(num_sampled)))

    def update(self, plan: StepPlan, result: StepResult) -> None:
        self._core.apply(result, 0.0)
        self._core.take_effects()


def make(config: Mapping[str, Any]) -> SchedulerBench:
    """`max_model_len` defaults to `max_num_batched_tokens`, as in a scenario."""
    configuration = SchedulerConfiguration(**config)
    if "max_model_len" not in config:
        longest = configuration.max_num_batched_tokens
        configuration = msgspec.structs.replace(configuration, max_model_len=longest)
    return SchedulerBench(configuration)


def microseconds_per_step(num_running: int, num_steps: int = 100) -> float:
    """CPU time, median over decode steps with one token for every one of `num_running` requests."""
    longest = _PROMPT + num_steps + 20
    bench = make(
        {
            "max_num_seqs": num_running,
            "max_model_len": longest,
            "prefix_caching": True,
            "usable_blocks": num_running * (longest // 16 + 1),
        }
    )
    bench.add([{"id": f"r{k}", "prompt": [k] * _PROMPT, "max_tokens": num_steps + 15} for k in range(num_running)])
    times: list[float] = []
    gc.collect()
    while len(times) < num_steps:
        begin = time.thread_time()
        plan = bench.schedule()
        planned = time.thread_time()
        result = bench.results(plan)
        resumed = time.thread_time()
        bench.update(plan, result)
        end = time.thread_time()
        if plan.num_tokens == len(plan.request_ids) == num_running:
            times.append(planned - begin + end - resumed)
    return statistics.median(times) * 1e6


def main() -> None:
    sizes = (64, 256, 1024, 4096)
    # In turn, several times, and the best: what the code costs, not what the neighbours cost.
    runs = [[microseconds_per_step(size) for size in sizes] for _ in range(3)]
    print("running   us/step   us/request")
    for place, size in enumerate(sizes):
        best = min(run[place] for run in runs)
        print(f"{size:7}  {best:8.0f}  {best / size:11.2f}")


if __name__ == "__main__":
    main()
