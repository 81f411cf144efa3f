"""The real scheduler core over a real small model: at any depth every request gets the tokens of depth 1, in float32.

Depth 1 plans a step when the one before has returned. Deeper, the core plans on placeholders, and rows of requests
that have ended meanwhile are computed for nothing. The pool is too small for all, so requests are preempted.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.configuration import SchedulerConfiguration
from actors.messages.plan import StepPlan
from actors.messages.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from actors.scheduling.core import SchedulerCore
from runner.model_runner import ModelRunner
from runner.step_in_progress import StepInProgress
from runner.store.store import resolve
from tests.runner.late import answer_late

BLOCK_SIZE, USABLE_BLOCKS, VOCABULARY = 4, 34, 320
CONFIGURATION = SchedulerConfiguration(
    usable_blocks=USABLE_BLOCKS,
    block_size=BLOCK_SIZE,
    max_num_seqs=6,
    max_num_batched_tokens=32,
    max_model_len=96,
    prefix_caching=True,
)
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.2, top_p=0.8, seed=9),
)


@pytest.fixture(scope="module")
def runner(
    tiny_model: Callable[..., tuple[Any, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelRunner]:
    """On one thread: with operations this small a second one only costs."""
    description = resolve(str(tiny_model()[1]), tmp_path_factory.mktemp("cache"))
    num_threads = torch.get_num_threads()
    yield ModelRunner(
        description, device="cpu", dtype="float32", num_blocks=USABLE_BLOCKS + 1, block_size=BLOCK_SIZE, threads=1
    )
    torch.set_num_threads(num_threads)


def workload(seed: int) -> list[EngineRequest]:
    """Prompts of 1 to 70 tokens, some with a common beginning; a third end at one of many stop tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCABULARY) for _ in range(30)]
    requests = []
    for index in range(18):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, 17, 40)))]
        stop_ids = tuple(range(index, VOCABULARY, 12)) if index % 3 == 0 else ()
        requests.append(
            EngineRequest(
                f"r{index}",
                tuple(common[: rng.choice((0, 0, 13, 30))] + own),
                SAMPLING[index % len(SAMPLING)],
                max_tokens=rng.randint(1, 26),
                eos_token_ids=stop_ids[::2],
                stop_token_ids=stop_ids[1::2],
                priority=rng.randrange(3),
                arrival=float(index),
            )
        )
    return requests


class Run(msgspec.Struct):
    tokens: dict[str, list[int]]
    reasons: dict[str, FinishReason]
    seen: Counter[str]  # what has happened, so that no test passes for want of it


def run(runner: ModelRunner, configuration: SchedulerConfiguration, seed: int, depth: int, aborted: int = -1) -> Run:
    return serve(runner, configuration, workload(seed), depth, aborted)


def serve(
    runner: ModelRunner,
    configuration: SchedulerConfiguration,
    waiting: list[EngineRequest],
    depth: int,
    aborted: int = -1,
) -> Run:
    """Two requests arrive in each round; then steps are planned up to `depth`, then the oldest returns."""
    core = SchedulerCore(msgspec.structs.replace(configuration, async_scheduling=depth > 1))
    # Whatever is read before it was computed, or cleared by the step that was given the block, shows.
    runner.kv_pool.tensor[1:].fill_(torch.nan)
    done = Run({request.request_id: [] for request in waiting}, {}, Counter())
    in_flight: deque[tuple[StepPlan, StepInProgress]] = deque()
    now = 0.0
    while waiting or in_flight or core.live_request_ids():
        now += 1.0
        for request in waiting[:2]:
            core.add(request, now)
        del waiting[:2]
        if now == aborted:
            for index in range(0, 18, 4):
                core.abort(f"r{index}", now)
        while len(in_flight) < depth and core.has_runnable():
            plan = core.schedule(now)
            if plan.request_ids:
                in_flight.append((plan, runner.launch(plan)))
            count(done.seen, plan, core)
        if in_flight:
            plan, step = in_flight.popleft()
            done.seen["ended"] += sum(core.live(request_id) is None for request_id in plan.request_ids)
            core.apply(step.result(), now)
        core.check()
        for effect in core.take_effects():
            assert isinstance(effect, RequestOutput)
            done.tokens[effect.request_id] += effect.token_ids
            if effect.finish_reason is not None:
                done.reasons[effect.request_id] = effect.finish_reason
    return done


def count(seen: Counter[str], plan: StepPlan, core: SchedulerCore) -> None:
    """Of a plan that was just made."""
    told = {request.request_id for request in plan.new_requests}
    seen["preempted"] += len(core.last_step.preempted)
    seen["resumed"] += len(core.last_step.resumed)
    columns = (plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_sampled)
    counts, computed, sampled = (np.frombuffer(column, np.int32) for column in columns)
    seen["hit"] += sum(name in told and at > 0 for name, at in zip(plan.request_ids, computed, strict=True))
    seen["chunk"] += int((sampled == 0).sum())
    seen["mixed"] += bool((counts == 1).any() and (counts > 1).any())
    for request, end in zip(core.last_step.requests, counts + computed, strict=True):
        seen["placeholder"] += bool(end > len(request.tokens))


@pytest.fixture(scope="module")
def serial(runner: ModelRunner) -> dict[int, Run]:
    roomy = msgspec.structs.replace(CONFIGURATION, prefix_caching=False, max_num_seqs=2)
    runs = {seed: run(runner, roomy, seed, 1) for seed in range(2)}
    for done in runs.values():
        assert set(done.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
        assert len({tuple(tokens) for tokens in done.tokens.values()}) > 12
    return runs


@pytest.mark.parametrize(
    ("depth", "late", "changed"),
    [
        (1, False, {}),
        (2, False, {"fence_frees": True}),
        (2, True, {"policy": "priority"}),
        (2, True, {"fence_frees": True, "reserve_full_sequence": True, "long_prefill_token_threshold": 9}),
        (3, False, {"policy": "priority", "fence_frees": True}),
        (3, True, {"long_prefill_token_threshold": 9}),
        (5, True, {"fence_frees": True}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_depth_1(
    depth: int,
    late: bool,
    changed: dict[str, Any],
    seed: int,
    runner: ModelRunner,
    serial: dict[int, Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if late:
        answer_late(monkeypatch)
    done = run(runner, msgspec.structs.replace(CONFIGURATION, **changed), seed, depth)
    assert done.tokens == serial[seed].tokens
    assert done.reasons == serial[seed].reasons
    expected = {"preempted", "resumed", "chunk", "mixed"} | ({"ended", "placeholder"} if depth > 1 else set())
    assert {name for name, times in done.seen.items() if times} >= expected, done.seen


@pytest.mark.parametrize("depth", [2, 3])
def test_aborts_with_steps_in_flight_touch_nobody_else(
    depth: int, runner: ModelRunner, serial: dict[int, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_late(monkeypatch)
    done = run(runner, CONFIGURATION, 0, depth, aborted=12)
    aborted = [request_id for request_id, reason in done.reasons.items() if reason is FinishReason.ABORT]
    assert len(aborted) >= 2
    for request_id, tokens in serial[0].tokens.items():
        got = done.tokens[request_id]
        assert got == (tokens[: len(got)] if request_id in aborted else tokens)
    assert done.seen["ended"] >= 2
