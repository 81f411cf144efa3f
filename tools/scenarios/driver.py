"""Runs a scenario on the scheduler core and observes it after every action.

The scripted connector answers what the scenario says; everything else is the core that serves requests: its loads and
leases go through the same orders and reports, only that here the scenario settles them. Time is the action's index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from actors.configuration import SchedulerConfiguration
from actors.messages.lease import Ticket
from actors.messages.plan import StepResult
from actors.messages.request import EngineRequest, FinishReason, RequestOutput
from actors.messages.transfer import BlocksLanded, BlocksSent, GrantLease, LeaseGranted, TransferOrder
from actors.scheduling.connector import NOTHING_REMOTE, Connector, RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from actors.scheduling.request import EncoderInput, RequestExtras, SchedulerRequest
from actors.scheduling.step import ScheduledStep
from tools.scenarios.format import Action, Config, NotAScenario, Remote, Scenario, Update

Observation = dict[str, Any]
DEFAULT_TOKEN = 7
_SENDING = (FinishReason.STOP, FinishReason.LENGTH)  # what a request may end with that others will want to read
_TICKET = Ticket("scenario", 0, "", 0, 0, b"", 0, b"")


class ScriptedConnector:
    def __init__(self) -> None:
        self.remote: dict[str, Remote] = {}
        self.delay_free: set[str] = set()

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        answer = self.remote.get(request.request_id)
        if answer is None:
            return NOTHING_REMOTE
        if answer.tokens is None:
            return None
        known = len(request.tokens)
        tokens = min(answer.tokens, known if answer.is_async else known - 1) - num_local_tokens
        return RemoteMatch(tokens, answer.is_async) if tokens > 0 else NOTHING_REMOTE

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        return None

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        return len(request.block_ids) if request.request_id in self.delay_free else 0


MakeCore = Callable[[SchedulerConfiguration, Connector | None], SchedulerCore]


class Driver:
    def __init__(self, scenario: Scenario, make_core: MakeCore | None = None) -> None:
        self._scenario = scenario
        self._connector = ScriptedConnector()
        self._core = (make_core or SchedulerCore)(
            core_configuration(scenario.config), self._connector if scenario.config.kv_connector else None
        )
        self._planned: deque[ScheduledStep] = deque()
        self._loads: dict[str, int | None] = {}  # id -> generation, under way
        self._sends: dict[str, int | None] = {}  # None: it ended without blocks, so there is nothing to settle
        self._num_added = 0
        self._now = 0.0

    def run(self) -> Iterator[Observation]:
        """One observation per action. Raises NotAScenario where an action is not possible."""
        for index, action in enumerate(self._scenario.actions):
            self._now = float(index)
            observation = self._act(action, f"$.actions[{index}]")
            observation.update(self._state())
            self._core.check()
            yield observation

    def _act(self, action: Action, path: str) -> Observation:
        core = self._core
        if action.add is not None:
            for place, name in enumerate(action.add):
                self._add(name, f"{path}.add[{place}]")
        elif action.schedule is not None:
            return self._schedule()
        elif action.update is not None:
            return self._update(action.update, f"{path}.update")
        elif action.abort is not None:
            for name in action.abort:
                core.abort(name, self._now)
            return {"finished": self._collect()["finished"]}
        elif action.pause is not None:
            core.pause(action.pause)
        elif action.grammar_ready is not None:
            for place, name in enumerate(action.grammar_ready):
                self._live(name, f"{path}.grammar_ready[{place}]")
                core.grammar_ready(name)
        elif action.remote is not None:
            for name, answer in action.remote.items():
                self._live(name, f"{path}.remote.{name}")
                self._connector.remote[name] = answer
        elif action.reset_prefix_cache is not None:
            ok = core.reset_prefix_cache(self._now, action.reset_prefix_cache.preempt_running)
            return {"ok": ok}
        return {}

    def _live(self, name: str, path: str) -> SchedulerRequest:
        request = self._core.live(name)
        if request is None:
            raise NotAScenario(path, f"request {name!r} is not live")
        return request

    def _add(self, name: str, path: str) -> None:
        if self._core.live(name) is not None:
            raise NotAScenario(path, f"request {name!r} is live already")
        given = self._scenario.requests[name]
        if given.remote is not None:
            self._connector.remote[name] = given.remote
        if given.delay_free:
            self._connector.delay_free.add(name)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=given.tokens,
            max_tokens=given.max_tokens,
            min_tokens=given.min_tokens,
            eos_token_ids=() if given.eos is None else (given.eos,),
            stop_token_ids=given.stop_token_ids,
            priority=given.priority,
            arrival=float(self._num_added if given.arrival is None else given.arrival),
            lora=given.lora,
            cache_salt=given.cache_salt,
            skip_prefix_cache=given.skip_prefix_cache,
        )
        self._num_added += 1
        items = tuple(EncoderInput(item.hash, item.offset, item.len) for item in given.encoder_inputs)
        self._core.add(request, self._now, RequestExtras(items, given.structured))
        for effect in self._core.take_effects():
            if isinstance(effect, RequestOutput):
                raise NotAScenario(path, f"request {name!r} can never run: {effect.error_text}")

    def _schedule(self) -> Observation:
        self._core.schedule(self._now)
        step = self._core.last_step
        self._planned.append(step)
        for name in step.loading:
            request = self._core.live(name)
            assert request is not None
            assert request.grant is not None
            self._loads[name] = request.grant.generation
        return {
            "scheduled": {request.request_id: count for request, count in zip(step.requests, step.counts, strict=True)},
            "new": step.new,
            "resumed": step.resumed,
            "preempted": step.preempted,
            "spec": {name: len(drafts) for name, drafts in step.drafts.items()},
            "cached": step.cached,
            "loading": step.loading,
        }

    def _update(self, update: Update, path: str) -> Observation:
        if not self._planned:
            raise NotAScenario(path, "no step is planned")
        step = self._planned.popleft()
        for name, indexes in update.invalid_blocks.items():
            num_blocks = len(self._live(name, f"{path}.invalid_blocks.{name}").block_ids)
            if any(index >= num_blocks for index in indexes):
                raise NotAScenario(f"{path}.invalid_blocks.{name}", f"the request has {num_blocks} blocks")
        result = self._result(step, update, f"{path}.sampled")
        self._core.apply_step(result, update.invalid_blocks, self._now)
        # Before the reports: an update may report the send of a request that it ends.
        observation = self._collect()
        for kind, under_way in (("received", self._loads), ("sent", self._sends)):
            for place, name in enumerate(getattr(update, kind)):
                if name not in under_way:
                    raise NotAScenario(f"{path}.{kind}[{place}]", f"nothing of {name!r} is under way")
                generation = under_way.pop(name)
                if generation is not None:
                    report = BlocksLanded if kind == "received" else BlocksSent
                    self._core.apply(report(name, generation), self._now)
        if update.drafts and self._scenario.config.async_scheduling:
            raise NotAScenario(f"{path}.drafts", "not with async_scheduling")
        for name, drafts in update.drafts.items():
            self._core.set_drafts(name, list(drafts))
        return observation

    def _result(self, step: ScheduledStep, update: Update, path: str) -> StepResult | None:
        rows = {request.request_id: row for row, request in enumerate(step.requests)}
        sampled: list[tuple[int, ...]] = [(DEFAULT_TOKEN,) if most else () for most in step.sampled]
        for name, tokens in update.sampled.items():
            if name not in rows:
                raise NotAScenario(f"{path}.{name}", "the request is not in this step")
            if len(tokens) > step.sampled[rows[name]]:
                raise NotAScenario(f"{path}.{name}", f"the step gives it at most {step.sampled[rows[name]]} tokens")
            sampled[rows[name]] = tokens
        if not rows:
            return None
        return StepResult(
            step=step.step,
            num_sampled=int32([len(tokens) for tokens in sampled]),
            sampled_token_ids=int32([token for tokens in sampled for token in tokens]),
        )

    def _collect(self) -> Observation:
        """Leases are granted at once, so that a finish is seen in the update that brings it."""
        finished: dict[str, str] = {}
        output: dict[str, list[int]] = {}
        while effects := self._core.take_effects():
            for effect in effects:
                if isinstance(effect, GrantLease):
                    self._sends[effect.request_id] = effect.generation
                    self._core.apply(LeaseGranted(effect.request_id, effect.generation, _TICKET), self._now)
                elif isinstance(effect, RequestOutput):
                    if effect.token_ids:
                        output[effect.request_id] = list(effect.token_ids)
                    if effect.finish_reason is not None:
                        finished[effect.request_id] = effect.finish_reason.value
                        if effect.finish_reason in _SENDING and effect.request_id in self._connector.delay_free:
                            self._sends.setdefault(effect.request_id, None)
        return {"finished": finished, "output": output}

    def _state(self) -> Observation:
        core = self._core
        live = [request for name in core.live_request_ids() if (request := core.live(name)) is not None]
        return {
            "running": [request.request_id for request in core.running],
            "waiting": [request.request_id for request in core.waiting],
            "skipped": [request.request_id for request in core.skipped_waiting],
            "status": {request.request_id: request.status.name for request in live},
            "computed": {request.request_id: request.num_computed_tokens for request in live},
            "free_blocks": core.num_free_blocks,
        }


def core_configuration(config: Config) -> SchedulerConfiguration:
    values = msgspec.structs.asdict(config)
    values["max_model_len"] = config.max_model_len or config.max_num_batched_tokens
    return SchedulerConfiguration(**values)


def first_difference(action: Action, observation: Observation) -> tuple[str, Any, Any] | None:
    """(field, expected, observed) of the first field of `expect` that differs; maps and lists are compared whole."""
    for field, expected in action.expect.items():
        observed = observation.get(field, "<absent>")
        if observed != expected:
            return field, expected, observed
    return None
