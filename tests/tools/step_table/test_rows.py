"""The rows of known scenarios, and what rows must always add up to. Expected values were recorded on the reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from actors.scheduling.core import SchedulerCore
from tests.conformance.test_scenarios import FILES, FOLDER, RANDOM
from tests.scheduling.test_state_machine import SchedulerMachine
from tools.scenarios.format import Scenario, parse
from tools.step_table.collector import Collector
from tools.step_table.rows import Step, StepRow
from tools.step_table.scenario import steps_of_scenario
from tools.step_table.watched import WatchedCore

RESET = "preempted: the prefix cache was reset"  # after the plan or the result, in the same step


def scenario_of(name: str) -> Scenario:
    return parse((FOLDER / f"{name}.json").read_bytes())


def rows_of(name: str) -> dict[tuple[int | None, str], StepRow]:
    """By step and request; a scenario with several steps without rows would hide some of them."""
    return {
        (row.step, row.request_id): row for step in steps_of_scenario(scenario_of(name)) for row in step.rows.values()
    }


def expected(scenario: Scenario, kind: str) -> list[dict[str, Any]]:
    return [action.expect for action in scenario.actions if action.kind == kind]


def planned(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.number]


def test_drafts_scheduled_and_accepted() -> None:
    """update 2 accepts 11 of 11, 12, 13 and adds 20; update 3 accepts 21 of 21 and adds 22."""
    rows = rows_of("spec-accept-and-reject")
    second, third, fourth = (rows[number, "a"] for number in (2, 3, 4))
    assert (second.num_known_tokens, second.num_drafts, second.num_tokens_with_spec) == (5, 3, 8)
    assert (second.num_scheduled_tokens, second.num_drafts_scheduled, second.num_drafts_accepted) == (4, 3, 1)
    assert (second.num_computed_tokens, second.num_computed_tokens_after, second.token_ids) == (4, 6, [11, 20])
    assert (third.num_drafts_scheduled, third.num_drafts_accepted, third.token_ids) == (1, 1, [21, 22])
    assert (fourth.num_drafts_scheduled, fourth.num_drafts_accepted) == (0, None)


def test_a_preempted_request_gives_all_its_blocks_back_and_says_to_whom() -> None:
    rows = rows_of("preempt-last-fcfs")
    victim = rows[2, "b"]  # 8 tokens in blocks of 4
    assert (victim.queue, victim.status, victim.events) == ("waiting", "PREEMPTED", ["preempted"])
    assert (victim.num_computed_tokens, victim.num_computed_tokens_after) == (8, 0)
    assert (victim.blocks_allocated, victim.blocks_freed, victim.blocks_held) == (0, 2, 0)
    assert victim.why == "b needed 1 blocks, 0 free"  # a took the last one for its 9th token
    assert rows[2, "c"].why == "nobody is admitted in a step that preempted"
    assert rows[3, "b"].why == "needs 3 blocks, 2 free"
    assert rows[3, "c"].why == "behind b, which needs 3 blocks, 2 free"
    back = rows[5, "b"]  # 8 of prompt and the token of step 1
    assert (back.events, back.num_scheduled_tokens, back.blocks_allocated) == (["resumed"], 9, 3)
    assert (rows[4, "a"].events, rows[4, "a"].blocks_freed) == (["finished: length"], 3)


def test_a_prefix_hit_is_counted_and_its_blocks_are_shared() -> None:
    """b shares the first block of 4 with a, which still runs; c begins otherwise."""
    rows = rows_of("prefix-hit")
    hit, miss = rows[2, "b"], rows[2, "c"]
    assert (hit.num_prefix_hit_tokens, hit.num_computed_tokens, hit.num_scheduled_tokens) == (4, 4, 8)
    assert (hit.blocks_allocated, hit.blocks_shared, hit.blocks_freed, hit.blocks_kept) == (3, 1, 3, 1)
    assert (miss.num_prefix_hit_tokens, miss.blocks_allocated, miss.blocks_shared) == (0, 3, 0)


def test_a_load_waits_aside_and_runs_when_it_has_landed() -> None:
    rows = rows_of("remote-async-load")
    begins, waits, runs = (rows[number, "a"] for number in (1, 2, 3))
    assert (begins.queue, begins.status) == ("skipped", "WAITING_FOR_REMOTE_KVS")
    assert (begins.num_remote_tokens, begins.num_scheduled_tokens, begins.blocks_allocated) == (8, 0, 2)
    assert begins.why == waits.why == "loads 8 tokens into 2 blocks"
    assert (waits.events, waits.num_remote_tokens, waits.blocks_held) == (["landed"], 0, 2)
    assert (runs.queue, runs.events, runs.num_computed_tokens, runs.num_scheduled_tokens) == ("running", ["new"], 8, 2)


def test_a_load_that_is_part_of_the_step() -> None:
    scenario = scenario_of("remote-sync-load")
    remote = next(name for name, request in scenario.requests.items() if request.remote is not None)
    first = next(
        row for row in rows_of("remote-sync-load").values() if row.request_id == remote and "new" in row.events
    )
    assert first.num_remote_tokens == first.num_computed_tokens - first.num_prefix_hit_tokens > 0


def test_async_steps_come_out_in_their_order_with_their_own_results() -> None:
    """Step 2 is planned with one token that is not known yet. 12 tokens are the prompt's 10 and two of three."""
    steps = list(steps_of_scenario(scenario_of("async-scheduling-basic")))
    assert [step.number for step in steps if step.has_rows] == [1, 2, 3]
    rows = [step.rows["a"] for step in steps if step.has_rows]
    assert [(row.num_known_tokens, row.num_placeholders) for row in rows] == [(10, 0), (10, 1), (11, 1)]
    assert [(row.num_computed_tokens, row.num_computed_tokens_after) for row in rows] == [(0, 10), (10, 11), (11, 12)]
    assert [row.token_ids for row in rows] == [[7], [7], [7]]
    assert rows[-1].events == ["finished: length"]
    waits = steps[-1].rows["a"]  # the plan without rows
    assert (waits.step, waits.why) == (None, "the steps in flight bring it to max_tokens")
    # Plan 2 (action 2) comes before the result of step 1 (action 3), which stands with step 1.
    assert [(moment.when, moment.what) for moment in steps[1].moments] == [
        ("1", "plan: 1 row; new a"),
        ("3", "result of step 1"),
    ]


def test_what_comes_back_after_an_end_is_for_nothing() -> None:
    rows = rows_of("async-stop-drops-inflight").values()
    assert any("came back for nothing" in row.events and not row.token_ids for row in rows)


def test_a_step_that_never_came_back_is_in_flight() -> None:
    scenario = scenario_of("async-scheduling-basic")
    first_two = Scenario(scenario.name, scenario.why, scenario.config, scenario.requests, scenario.actions[:3])
    steps = planned(list(steps_of_scenario(first_two)))
    assert [step.in_flight for step in steps] == [True, True]
    assert [step.rows["a"].token_ids for step in steps] == [[], []]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lora-cap-skips", "max_loras 1 reached"),
        ("max-num-seqs", "max_num_seqs 2 reached"),
        ("structured-waits-for-grammar", "its grammar is not ready"),
        ("pause-new-and-all", "paused: nothing is scheduled"),
        ("pause-new-and-all", "paused: nobody new is admitted"),
        ("remote-undecided", "the connector does not know yet"),
        ("budget-splits-prefill", "token budget spent"),
    ],
)
def test_why_somebody_was_not_scheduled(name: str, why: str) -> None:
    reasons = {row.why for step in steps_of_scenario(scenario_of(name)) for row in step.rows.values()}
    assert any(why in reason for reason in reasons), reasons


@pytest.mark.parametrize("file", [*FILES, *RANDOM], ids=lambda file: file.stem)
def test_rows_say_what_the_reference_did_and_every_block_is_accounted_for(file: Path) -> None:
    scenario = parse(file.read_bytes())
    usable, scheduled_ahead = scenario.config.usable_blocks, scenario.config.async_scheduling
    cores: list[WatchedCore] = []

    def observed(_action: Any, observation: dict[str, Any], core: WatchedCore) -> None:
        assert core.blocks.num_used == usable - observation["free_blocks"]
        cores[:] = [core]

    steps = list(steps_of_scenario(scenario, observed))
    must_be_recorded(scenario, planned(steps))
    used, held = 0, Counter[str]()
    for step in steps:
        for row in step.rows.values():
            used += row.blocks_allocated - row.blocks_shared - row.blocks_freed + row.blocks_kept
            held[row.request_id] += row.blocks_allocated - row.blocks_freed
            if not scheduled_ahead:
                assert row.blocks_held == held[row.request_id] >= 0
            assert not (row.why and row.num_scheduled_tokens), row
            assert row.why or row.num_scheduled_tokens or not row.queue, row
        if not scheduled_ahead:
            assert used == usable - step.free_after
    (core,) = cores
    assert used == usable - core.num_free_blocks
    grants = core.blocks_report(0.0).grants
    at_the_end = Counter[str]()
    for grant in grants:
        at_the_end[grant.request_id] += grant.blocks
    assert +held == +at_the_end


def must_be_recorded(scenario: Scenario, steps: list[Step]) -> None:
    plans, updates = expected(scenario, "schedule"), expected(scenario, "update")
    assert len(steps) == len(plans)
    for step, plan in zip(steps, plans, strict=True):
        rows = step.rows
        seen = {
            "scheduled": {name: row.num_scheduled_tokens for name, row in rows.items() if row.num_scheduled_tokens},
            "spec": {name: row.num_drafts_scheduled for name, row in rows.items() if row.num_drafts_scheduled},
            "cached": {name: row.num_prefix_hit_tokens for name, row in rows.items() if row.num_prefix_hit_tokens},
            "loading": {name: row.num_remote_tokens for name, row in rows.items() if "loading" in row.events},
        }
        for kind in ("new", "resumed", "preempted"):
            names = {name for name, row in rows.items() if kind in row.events}
            assert names == set(plan.get(kind, names))
        for field in ("scheduled", "spec", "cached", "loading"):
            assert seen[field] == plan.get(field, seen[field])
        for name, status in plan.get("status", {}).items():
            if rows[name].status != "FINISHED" and RESET not in rows[name].events:
                assert rows[name].status == status
                assert name in plan.get(rows[name].queue, [name])
    for step, update in zip(steps, updates, strict=False):
        out = {name: row.token_ids for name, row in step.rows.items() if row.token_ids}
        assert out == update.get("output", out)
        if not scenario.config.async_scheduling:
            for name, computed in update.get("computed", {}).items():
                row = step.rows.get(name)  # None: it came after the plan
                if row is not None and RESET not in row.events:
                    assert row.num_computed_tokens_after == computed
    ends = Counter(
        (name, event.removeprefix("finished: "))
        for step in steps
        for name, row in step.rows.items()
        for event in row.events
        if event in ("finished: stop", "finished: length")
    )
    recorded = [(name, why) for update in updates for name, why in update.get("finished", {}).items()]
    assert ends == Counter(end for end in recorded if end[1] in ("stop", "length"))


class WatchedMachine(SchedulerMachine):
    """The state machine on a watched core: the same plans, and rows that add up after every event and at the end."""

    loses = False  # at the end nobody holds a block
    gives_malformed = False

    def new_core(self) -> SchedulerCore:
        self.collector = Collector()
        self.table: list[Step] = []
        return WatchedCore(self.config, collector=self.collector)

    def give(self, call: Any) -> Any:
        answer = super().give(call)
        core = self.core
        assert isinstance(core, WatchedCore)
        assert core.blocks.num_used == self.config.usable_blocks - core.num_free_blocks
        self.table += self.collector.take()
        return answer

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        super().teardown()
        self.table += self.collector.end()
        held = Counter[str]()
        for step in self.table:
            assert not step.in_flight
            for row in step.rows.values():
                held[row.request_id] += row.blocks_allocated - row.blocks_freed
                assert row.blocks_held >= 0
        assert not +held  # all has drained
        tokens = Counter[str]()
        for step in self.table:
            for row in step.rows.values():
                tokens[row.request_id] += len(row.token_ids)
        for name, outputs in self.outputs.items():
            published = sum(len(output.token_ids) for output in outputs)
            # The token of a request whose lease is denied came out, and is not published.
            assert tokens[name] == published or (outputs[-1].error and tokens[name] > published)


TestRandomRuns = WatchedMachine.TestCase
TestRandomRuns.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
