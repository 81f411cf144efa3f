"""Hypothesis drives the real core with everything the world may do to it, in tiny pools.

After every event `check()` recomputes the invariants (conservation of blocks among them), the simulated worker proves
that each row reads the KV of its own tokens, and each ticket's obligation is discharged exactly once. At the end all
reports are delivered and everything that fits must finish (liveness); the same inputs must give the same plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.configuration import ROBUST_RULES, SchedulerConfiguration
from actors.messages.errors import RefusalReason
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.transfer import BlocksLanded, BlocksQuiet, BlocksSent, LeaseExpired, TransferFailed
from actors.scheduling.core import SchedulerCore
from actors.scheduling.request import EncoderInput, RequestExtras
from tests.scheduling.simulated import SimulatedTransfers, SimulatedWorker, ints

STOP_TOKEN = 2


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 32),
        block_size=st.sampled_from([1, 2, 4]),
        usable_blocks=st.integers(3, 14),
        policy=st.sampled_from(["fcfs", "priority"]),
        on=st.fixed_dictionaries(
            {
                name: st.booleans()
                for name in ("prefix_caching", "chunked_prefill", "async_scheduling", "reserve_full_sequence")
            }
        ),
        num_spec_tokens=st.sampled_from([0, 0, 1, 3]),
        max_loras=st.sampled_from([0, 1, 2]),
        encoder=st.sampled_from([(0, 0), (4, 6), (9, 5)]),
        depth=st.sampled_from([2, 3]),
        budget=st.sampled_from([3, 6, 16, 40]),
        threshold=st.sampled_from([0, 0, 2]),
        watermark=st.sampled_from([0.0, 0.2]),
        max_num_seqs=st.integers(1, 5),
        failure=st.sampled_from(["recompute", "recompute", "fail"]),
    )
    def begin(
        self,
        seed: int,
        block_size: int,
        usable_blocks: int,
        policy: Any,
        on: dict[str, bool],
        budget: int,
        threshold: int,
        watermark: float,
        max_num_seqs: int,
        failure: Any,
        num_spec_tokens: int,
        max_loras: int,
        encoder: tuple[int, int],
        depth: int,
    ) -> None:
        self.rng = random.Random(seed)
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
            **ROBUST_RULES,
            num_spec_tokens=num_spec_tokens,
            max_loras=max_loras,
            encoder_budget=encoder[0],
            encoder_cache=encoder[1],
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
        self.transfers = SimulatedTransfers(block_size, memory, self.rng)
        self.now = 0.0
        self.added: dict[str, EngineRequest] = {}
        self.extras: dict[str, RequestExtras] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.disturbed: set[str] = set()  # aborted
        self.has_lost = False
        self.results: list[StepResult] = []
        self.inputs: list[Callable[[SchedulerCore], Any]] = []
        self.answers: list[Any] = []

    def depends_on(self, request_id: str, position: int) -> tuple[object, ...]:
        request = self.added[request_id]
        items = [("item", item.hash, item.offset) for item in self.extras[request_id].encoder_inputs]
        seen = [item for item in items if item[2] <= position]
        isolated = [("isolated", request.lora, request.cache_salt)] if request.lora or request.cache_salt else []
        return (*isolated, *seen)

    def new_core(self) -> SchedulerCore:
        return SchedulerCore(self.config)

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
        before.append(output)
        if output.finish_reason is None:
            return
        request = self.added[output.request_id]
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

    @rule(
        length=st.integers(1, 20),
        family=st.integers(0, 2),
        max_tokens=st.integers(1, 8),
        kind=st.sampled_from(["plain", "plain", "ticket", "ticket", "lease"]),
        priority=st.integers(0, 2),
        patience=st.sampled_from([float("inf"), float("inf"), 6.0, 25.0]),
        shift=st.sampled_from([0, 0, -1, 3]),
        lora=st.sampled_from([None, None, "x", "y", "z"]),
        salt=st.sampled_from([None, None, None, "s"]),
        item=st.sampled_from([None, None, (0, 2, "h"), (3, 2, "h"), (1, 5, "long")]),
        gated=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        length: int,
        family: int,
        max_tokens: int,
        kind: str,
        priority: int,
        patience: float,
        shift: int,
        lora: str | None,
        salt: str | None,
        item: tuple[int, int, str] | None,
        gated: bool,
    ) -> None:
        request_id = f"r{len(self.added)}"
        tokens = tuple(10 * family + place for place in range(length))
        ticket = None
        if kind == "ticket":
            remote = tuple(10 * family + place for place in range(max(length + shift, 1)))
            ticket = self.transfers.ticket(remote, len(self.added))
        request = EngineRequest(
            request_id,
            tokens,
            max_tokens=max_tokens,
            eos_token_ids=(STOP_TOKEN,),
            priority=priority,
            arrival=self.now,
            deadline=self.now + patience,
            do_remote_decode=kind == "lease",
            ticket=ticket,
            lora=lora if kind == "plain" else None,
            cache_salt=salt if kind == "plain" else None,
        )
        inputs: tuple[EncoderInput, ...] = ()
        if kind == "plain" and item is not None and item[0] + item[1] <= length:
            inputs = (EncoderInput(item[2], item[0], item[1]),)
        self.extras[request_id] = extras = RequestExtras(inputs, gated)
        self.added[request_id] = request
        self.outputs[request_id] = []
        self.transfers.note(request)
        now = self.now
        self.give(lambda core: core.add(request, now, extras))

    @rule(place=st.integers(0, 50))
    def grammar_ready(self, place: int) -> None:
        """Also of requests that are gone, or never waited for one."""
        if self.added:
            request_id = list(self.added)[place % len(self.added)]
            self.give(lambda core: core.grammar_ready(request_id))

    @rule(mode=st.sampled_from(["none", "none", "new", "all"]))
    def pause(self, mode: Any) -> None:
        self.give(lambda core: core.pause(mode))

    @precondition(lambda self: self.config.num_spec_tokens and not self.config.async_scheduling and self.added)
    @rule(place=st.integers(0, 50), number=st.integers(1, 3))
    def drafts(self, place: int, number: int) -> None:
        request_id = list(self.added)[place % len(self.added)]
        tokens = [5] * min(number, self.config.num_spec_tokens)
        self.give(lambda core: core.set_drafts(request_id, tokens))

    @rule(times=st.integers(1, 8))
    def steps(self, times: int) -> None:
        """The usual course: each time plan, or apply the oldest result; sometimes a report comes in between."""
        for _ in range(times):
            self.step()
            self.core.check()
            if self.transfers.due and self.rng.random() < 0.3:
                self.transfers.write_something()
                self.deliver(self.rng.randrange(8))
                self.core.check()

    def step(self) -> None:
        if len(self.worker.plans) < self.depth and self.rng.random() < 0.8:
            self.plan()
        elif self.worker.plans:
            self.apply_oldest()

    def plan(self) -> StepPlan:
        now = self.now
        could = self.core.has_runnable()
        plan: StepPlan = self.give(lambda core: core.schedule(now))
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        if plan.request_ids:
            assert could, "a plan although nothing was runnable"
            self.worker.plans.append(plan)
            self.encoder_outputs_are_there(plan)
        return plan

    def encoder_outputs_are_there(self, plan: StepPlan) -> None:
        counts, computed = ints(plan.num_scheduled_tokens), ints(plan.num_computed_tokens)
        for request_id, count, start in zip(plan.request_ids, counts, computed, strict=True):
            for item in self.extras[request_id].encoder_inputs:
                if item.offset < start + count and start < item.offset + item.length:
                    assert self.core.holds_encoder_output(request_id, item.hash), f"{request_id}: {item} is not there"

    def apply_oldest(self) -> None:
        result = self.worker.run_oldest()
        self.results.append(result)
        now = self.now
        self.give(lambda core: core.apply(result, now))

    @precondition(lambda self: self.transfers.due)
    @rule(place=st.integers(0, 50))
    def deliver(self, place: int) -> None:
        """Any report that is due, so also the end of a lease before its grant, or quiet before the failure."""
        report = self.transfers.deliver(place % len(self.transfers.due))
        now = self.now
        self.give(lambda core: core.apply(report, now))

    @precondition(lambda self: self.transfers.delivered or self.results)
    @rule(place=st.integers(0, 50))
    def deliver_again(self, place: int) -> None:
        seen = [*self.transfers.delivered, *self.results]
        message = seen[place % len(seen)]
        now, late = self.now, self.core.stats().late_events_total
        before = len(self.answers)
        self.give(lambda core: core.apply(message, now))
        assert self.answers[before][1] == []
        if isinstance(message, StepResult | BlocksLanded | TransferFailed | BlocksSent | LeaseExpired):
            assert self.core.stats().late_events_total == late + 1

    @precondition(lambda self: self.transfers.due)
    @rule(place=st.integers(0, 50), is_lost=st.sampled_from([False] * 9 + [True]))
    def lose(self, place: int, is_lost: bool) -> None:
        """A report that never comes: what it would have freed stays accounted for, and nobody else is held up by it."""
        if is_lost:
            self.transfers.lose(place % len(self.transfers.due))
            self.has_lost = True

    @rule()
    def unknown_messages(self) -> None:
        now, late = self.now, self.core.stats().late_events_total
        for message in (StepResult(999_999, b"", b""), BlocksLanded("r0", 999_999), BlocksQuiet("nobody", 1)):
            self.give(lambda core, message=message: core.apply(message, now))
        assert self.core.stats().late_events_total == late + 3

    @precondition(lambda self: self.added)
    @rule(place=st.integers(0, 50))
    def abort(self, place: int) -> None:
        request_id = list(self.added)[place % len(self.added)]
        self.disturbed.add(request_id)
        now = self.now
        self.give(lambda core: core.abort(request_id, now, "test"))
        assert request_id not in self.core.live_request_ids()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        now = self.now
        self.give(lambda core: core.expire(now))
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > now

    @precondition(lambda self: self.transfers.writing)
    @rule()
    def bytes_land(self) -> None:
        self.transfers.write_something()

    @rule(preempts=st.booleans())
    def reset_prefix_cache(self, preempts: bool) -> None:
        if self.rng.random() < 0.3:
            now = self.now
            self.give(lambda core: core.reset_prefix_cache(now, preempts))

    @invariant()
    def holds(self) -> None:
        self.core.check()
        report = self.core.blocks_report(self.now)
        states = report.free + report.held + report.fenced + report.leased + report.quarantined
        assert report.usable == states == self.config.usable_blocks

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.give(lambda core: core.pause("none"))
        if self.has_lost:
            self.all_is_accounted_for()
            return
        for request_id in list(self.added):
            self.give(lambda core, request_id=request_id: core.grammar_ready(request_id))
        idle = rounds = 0
        while self.core.live_request_ids() or self.transfers.due or self.worker.plans:
            progress = bool(self.transfers.due or self.worker.plans)
            if self.transfers.due:
                self.transfers.write_something()
                self.deliver(self.rng.randrange(8))
            if self.worker.plans:
                self.apply_oldest()
            while len(self.worker.plans) < self.depth and self.core.has_runnable():
                progress |= bool(self.plan().request_ids)
            self.core.check()
            idle = 0 if progress else idle + 1
            rounds += 1
            assert rounds < 200 + 100 * len(self.added), f"busy and getting nowhere: {self.core.live_request_ids()}"
            assert idle < 3, f"stuck: {[self.core.live(name) for name in self.core.live_request_ids()]}"
        self.all_is_given_back()
        self.every_answer_is_right()
        self.same_inputs_same_plans()

    def all_is_accounted_for(self) -> None:
        """After a loss: everybody can be aborted, and only blocks of transfers that have not ended are not free."""
        now = self.now
        for request_id in self.core.live_request_ids():
            self.give(lambda core, request_id=request_id: core.abort(request_id, now, "test"))
        while self.worker.plans:
            self.apply_oldest()
        while self.transfers.due:
            self.deliver(0)
        self.core.check()
        assert self.core.live_request_ids() == []
        lost = set(self.transfers.writing) | set(self.transfers.reading)
        assert {grant.generation for grant in self.core.blocks_report(now).grants} <= lost
        self.same_inputs_same_plans()

    def all_is_given_back(self) -> None:
        stats = self.core.stats()
        assert stats.blocks_free == self.config.usable_blocks
        assert self.core.blocks_report(self.now).grants == ()
        assert self.transfers.held == set(), "a ticket whose obligation was forgotten"
        assert len(self.transfers.ended) == len(set(self.transfers.ended))

    def every_answer_is_right(self) -> None:
        for request_id, request in self.added.items():
            last = self.outputs[request_id][-1]
            assert last.finish_reason is not None
            most = min(len(request.prompt_token_ids) + request.max_tokens, 40)
            if request_id in self.disturbed or last.error == RefusalReason.DEADLINE_EXCEEDED:
                continue
            fits = -(-most // self.config.block_size) <= self.config.usable_blocks
            reasons = set()
            if not fits:
                reasons.add(RefusalReason.EXCEEDS_KV_CAPACITY)
            if any(item.length > min(self.encoder_limits) for item in self.extras[request_id].encoder_inputs):
                reasons.add(RefusalReason.INVALID_REQUEST)
            if request.do_remote_decode:
                reasons.add(RefusalReason.KV_SEND_FAILED)
            if request.ticket is not None and self.config.kv_load_failure_policy == "fail":
                reasons.add(RefusalReason.KV_LOAD_FAILED)
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) or last.error in reasons

    @property
    def encoder_limits(self) -> tuple[int, int]:
        return self.config.encoder_budget, self.config.encoder_cache

    def same_inputs_same_plans(self) -> None:
        core = SchedulerCore(self.config)
        for call, answer in zip(self.inputs, self.answers, strict=True):
            assert (call(core), core.take_effects()) == answer


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=400, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
