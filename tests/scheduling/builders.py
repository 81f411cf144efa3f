"""Short ways to a core, a request and a step's result."""

from __future__ import annotations

from typing import Any

from actors.configuration import ROBUST_RULES, SchedulerConfiguration
from actors.messages.lease import Ticket, prompt_digest
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, RequestOutput
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from tests.scheduling.simulated import ints

ROBUST: dict[str, Any] = {**ROBUST_RULES, "fence_frees": False}


def core_of(**config: Any) -> SchedulerCore:
    """With the engine's robust rules, but for `fence_frees`, which a test asks for."""
    return SchedulerCore(SchedulerConfiguration(**{"block_size": 4, "kv_connector": True, **ROBUST, **config}))


def request_of(request_id: str, length: int, first: int = 0, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id, tuple(range(first, first + length)), **fields)


def ticket_of(tokens: int, first: int = 0) -> Ticket:
    digest = prompt_digest(tuple(range(first, first + tokens)))
    return Ticket("prefill-0", 3, "127.0.0.1", 9, 77, b"c" * 16, tokens, digest)


def counts(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.request_ids, ints(plan.num_scheduled_tokens), strict=True))


def result_of(plan: StepPlan, token: int = 7) -> StepResult:
    """One `token` for every row that samples."""
    sampled = [min(most, 1) for most in ints(plan.num_sampled)]
    return StepResult(plan.step, int32(sampled), int32([token] * sum(sampled)))


def run_step(core: SchedulerCore, now: float = 0.0, token: int = 7) -> dict[str, int]:
    plan = core.schedule(now)
    if plan.request_ids:
        core.apply(result_of(plan, token), now)
    core.check()
    return counts(plan)


def outputs(core: SchedulerCore) -> list[RequestOutput]:
    return [effect for effect in core.take_effects() if isinstance(effect, RequestOutput)]
