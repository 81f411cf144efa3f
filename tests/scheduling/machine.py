"""The world around the core that hypothesis drives: its configuration, worker, transfers, and all that came of it.

Every input goes through `give`, so that it can be given again to another core. The rules are in `test_state_machine`,
what must hold at the end in `endings`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from actors.configuration import ROBUST_RULES, SchedulerConfiguration
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.transfer import TransferReport
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import RequestExtras
from tests.scheduling.scripted import ScriptedCore
from tests.scheduling.simulated import BAD_TOKEN, InStepLoad, SimulatedTransfers, SimulatedWorker, ints

STOP_TOKEN = 2
ON = ("prefix_caching", "chunked_prefill", "async_scheduling", "reserve_full_sequence")


class Returned(NamedTuple):
    """A result that the worker has, and the core has not. `bad`: the blocks and the grant of which they are a part."""

    result: StepResult
    bad: dict[str, tuple[int, tuple[int, ...]]]


def drawn_rules() -> st.SearchStrategy[dict[str, Any]]:
    """The engine's, or any mixture with the reference's side of each key."""
    defaults = SchedulerConfiguration()
    sides = {key: st.sampled_from([value, getattr(defaults, key)]) for key, value in ROBUST_RULES.items()}
    mixtures = st.fixed_dictionaries(sides)
    return st.one_of(st.just(ROBUST_RULES), mixtures, mixtures)


class SchedulerWorld(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 32),
        block_size=st.sampled_from([4, 2, 4, 2, 1]),
        usable_blocks=st.integers(3, 14),
        policy=st.sampled_from(["fcfs", "priority"]),
        on=st.fixed_dictionaries({name: st.booleans() for name in ON}),
        num_spec_tokens=st.sampled_from([0, 0, 1, 3]),
        max_loras=st.sampled_from([0, 1, 2]),
        encoder=st.sampled_from([(0, 0), (4, 6), (9, 5)]),
        depth=st.sampled_from([2, 3]),
        budget=st.sampled_from([3, 6, 16, 40]),
        threshold=st.sampled_from([0, 0, 2]),
        watermark=st.sampled_from([0.0, 0.2]),
        max_num_seqs=st.integers(1, 5),
        failure=st.sampled_from(["recompute", "recompute", "fail"]),
        rules=drawn_rules(),
    )
    def begin(
        self,
        seed: int,
        block_size: int,
        usable_blocks: int,
        policy: Any,
        on: dict[str, Any],
        budget: int,
        threshold: int,
        watermark: float,
        max_num_seqs: int,
        failure: Any,
        num_spec_tokens: int,
        max_loras: int,
        encoder: tuple[int, int],
        depth: int,
        rules: dict[str, Any],
    ) -> None:
        self.rng = random.Random(seed)
        if on["async_scheduling"] and not rules["trim_padding"]:
            threshold = 0  # with padding that it cuts, the reference schedules tokens that nobody knows
        self.config = SchedulerConfiguration(
            usable_blocks=usable_blocks,
            block_size=block_size,
            policy=policy,
            max_num_batched_tokens=budget,
            max_model_len=40,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            max_num_seqs=max_num_seqs,
            kv_load_failure_policy=failure,
            kv_connector=True,
            num_spec_tokens=num_spec_tokens,
            max_loras=max_loras,
            encoder_budget=encoder[0],
            encoder_cache=encoder[1],
            **rules,
            **on,
        )
        self.core = self.new_core()
        memory: dict[tuple[int, int], tuple[object, ...]] = {}
        self.depth = depth if self.config.async_scheduling else 1
        self.worker = SimulatedWorker(
            block_size,
            memory,
            lambda: self.rng.choice([STOP_TOKEN, 5, 6, 7, 8]),
            accept=lambda num_drafts: self.rng.randint(0, num_drafts),
            depends_on=self.depends_on,
        )
        # Of a victim's last step the reference leaves blocks in the prefix cache that nobody wrote.
        self.worker.is_strict = self.config.forget_uncomputed or not self.config.prefix_caching
        self.transfers = SimulatedTransfers(block_size, memory, self.rng)
        self.now = 0.0
        self.added: dict[str, EngineRequest] = {}
        self.extras: dict[str, RequestExtras] = {}
        self.in_step: dict[str, int] = {}  # request -> leading tokens that a step can load
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.disturbed: set[str] = set()  # aborted
        self.tainted: set[str] = set()  # preempted before the result that said which of its blocks had been bad
        self.lost_generations: set[int] = set()  # of transfers of which a report was lost
        self.num_lost_results = 0
        self.returned: list[Returned] = []
        self.grants_of: dict[int, dict[str, int]] = {}  # step -> generation of each row's grant
        self.epochs: dict[str, int] = {}  # as of the newest plan with the request
        self.results: list[StepResult] = []  # that the core has been given
        self.inputs: list[Callable[[SchedulerCore], Any]] = []
        self.answers: list[Any] = []

    def depends_on(self, request_id: str, position: int) -> tuple[object, ...]:
        request = self.added[request_id]
        items = [("item", item.hash, item.offset) for item in self.extras[request_id].encoder_inputs]
        seen = [item for item in items if item[2] <= position]
        isolated = [("isolated", request.lora, request.cache_salt)] if request.lora or request.cache_salt else []
        return (*isolated, *seen)

    def new_core(self) -> SchedulerCore:
        return ScriptedCore(self.config)

    def twin(self) -> SchedulerCore:
        """A core that, given the same inputs, must do the same."""
        return ScriptedCore(self.config) if isinstance(self.core, ScriptedCore) else SchedulerCore(self.config)

    @property
    def is_robust(self) -> bool:
        return all(getattr(self.config, key) == value for key, value in ROBUST_RULES.items())

    # Every input goes through here, so that it can be given again.
    def give(self, call: Callable[[SchedulerCore], Any]) -> Any:
        self.inputs.append(call)
        answer = call(self.core)
        effects = self.core.take_effects()
        self.answers.append((answer, effects))
        for effect in effects:
            if isinstance(effect, RequestOutput):
                self.publish(effect)
            else:
                self.transfers.take(effect)
        return answer

    def publish(self, output: RequestOutput) -> None:
        before = self.outputs[output.request_id]
        assert not any(other.finish_reason for other in before), "an output after the last one"
        if output.request_id not in self.tainted:
            assert BAD_TOKEN not in output.token_ids, "a token that was drawn from KV which is not there"
        before.append(output)
        request = self.added[output.request_id]
        assert output.num_cached_tokens <= len(request.prompt_token_ids)
        if output.finish_reason is None:
            return
        parts = output.story
        assert parts[0].start == request.arrival
        assert parts[-1].end == self.now
        assert all(one.end == other.start for one, other in pairwise(parts))
        tokens = [token for other in before for token in other.token_ids]
        assert len(tokens) <= request.max_tokens
        if output.finish_reason is FinishReason.STOP:
            assert tokens[-1] == STOP_TOKEN
        if output.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == request.max_tokens or len(tokens) + len(request.prompt_token_ids) == 40
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (output.ticket is not None) == request.do_remote_decode

    # The worker

    @property
    def num_in_flight(self) -> int:
        return len(self.worker.plans) + len(self.returned) + self.num_lost_results

    def plan(self) -> StepPlan:
        now = self.now
        could = self.core.has_runnable()
        plan: StepPlan = self.give(lambda core: core.schedule(now))
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        if plan.request_ids:
            # The reference's patience runs out without an input.
            assert could or self.config.standstill_patience, "a plan although nothing was runnable"
            self.worker.plans.append(plan)
            self.note_rows(plan)
        return plan

    def note_rows(self, plan: StepPlan) -> None:
        """What the worker is told beside the plan, and what a plan may rely on."""
        grants = self.grants_of[plan.step] = {}
        new = {request.request_id for request in plan.new_requests}
        counts, computed = ints(plan.num_scheduled_tokens), ints(plan.num_computed_tokens)
        for request_id, count, start in zip(plan.request_ids, counts, computed, strict=True):
            request = self.core.live(request_id)
            assert request is not None
            assert request.grant is not None
            grants[request_id] = request.grant.generation
            if self.epochs.get(request_id, request.epoch) != request.epoch:
                self.worker.known.setdefault(plan.step, {})[request_id] = len(request.tokens)
            self.epochs[request_id] = request.epoch
            if request_id in new and request_id in self.in_step:
                self.load_in_step(plan.step, request_id, self.core.last_step.cached.get(request_id, 0), start)
            for item in self.extras[request_id].encoder_inputs:
                if item.offset < start + count and start < item.offset + item.length:
                    assert self.core.holds_encoder_output(request_id, item.hash), f"{request_id}: {item} is not there"

    def load_in_step(self, step: int, request_id: str, start: int, end: int) -> None:
        blocks = range(start // self.config.block_size, -(-end // self.config.block_size))
        # What failed may be hit by others until it is computed again: as in the reference, and in no engine of ours.
        may_fail = not self.config.prefix_caching
        bad = tuple(block for block in blocks if may_fail and self.rng.random() < 0.2)
        self.worker.loads.setdefault(step, []).append(InStepLoad(request_id, start, end, bad))

    def run_oldest(self) -> None:
        step = self.worker.plans[0].step
        loads = self.worker.loads.get(step, [])
        bad = {load.request_id: (self.grants_of[step][load.request_id], load.bad) for load in loads if load.bad}
        self.returned.append(Returned(self.worker.run_oldest(), bad))

    def give_result(self, place: int) -> None:
        """Bad blocks can be told of a request only as long as it has them."""
        result, found = self.returned.pop(place)
        bad = {}
        for request_id, (generation, blocks) in found.items():
            request = self.core.live(request_id)
            if request is not None and request.grant is not None and request.grant.generation == generation:
                bad[request_id] = list(blocks)
            else:
                self.tainted.add(request_id)
        self.results.append(result)
        now = self.now
        self.give(lambda core: core.apply_step(result, bad, now))

    def run_and_give(self) -> None:
        """The oldest result that the core lacks; now and then another one."""
        if self.worker.plans and (not self.returned or self.rng.random() < 0.5):
            self.run_oldest()
        if self.returned:
            self.give_result(0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.returned)))

    def step(self) -> None:
        if self.num_in_flight < self.depth and self.rng.random() < 0.8:
            self.propose_drafts()
            self.plan()
        else:
            self.run_and_give()

    def propose_drafts(self) -> None:
        """As the model runner does between steps; async scheduling counts on drafts without knowing them."""
        if not self.config.num_spec_tokens or self.config.async_scheduling:
            return
        for request in self.core.running:
            tokens = [5] * self.rng.randint(0, self.config.num_spec_tokens)
            self.give(self.drafts_of(request.request_id, tokens))

    def drafts_of(self, request_id: str, tokens: list[int]) -> Callable[[SchedulerCore], None]:
        return lambda core: core.set_drafts(request_id, tokens)

    # Transfers

    def bytes_come(self) -> None:
        """Without fences, loads and steps are ordered as the reference's worker orders them."""
        while not self.config.fence_frees and self.worker.plans:
            self.run_oldest()
        self.transfers.write_something()

    def give_report(self, place: int) -> None:
        while not self.config.fence_frees and self.worker.plans:
            self.run_oldest()
        report: TransferReport = self.transfers.deliver(place % len(self.transfers.due))
        now = self.now
        self.give(lambda core: core.apply(report, now))

    @invariant()
    def holds(self) -> None:
        self.core.check()
        report = self.core.blocks_report(self.now)
        states = report.free + report.held + report.fenced + report.leased + report.quarantined
        assert report.usable == states == self.config.usable_blocks
