"""The scheduler core behind the face that a scheduler benchmark drives: what an engine does per step, and no more.

`make(config)` takes the keys of the scenario format. Per step: `schedule`, `apply` of the result, `take_effects`.
Needs the standard library, msgspec and numpy alone, so that it runs in another engine's Python. How to measure with it:
docs/conformance.md.
"""

from __future__ import annotations

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
