"""Replay equals run: random runs, every scenario, other hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from actors.configuration import SchedulerConfiguration
from actors.scheduling.connector import Connector, RemoteMatch
from actors.scheduling.core import SchedulerCore
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import (
    Planned,
    Record,
)
from actors.scheduling.request import SchedulerRequest
from tests.conformance.test_scenarios import FILES, RANDOM
from tests.scheduling.recorded_runs import must_be_equal, random_run, replayed
from tests.scheduling.test_state_machine import SchedulerMachine
from tools.scenarios.driver import Driver
from tools.scenarios.format import parse

ROOT = Path(__file__).parents[2]


class RecordedMachine(SchedulerMachine):
    """The state machine, on a core that records; at the end of every run a replay must come to the same."""

    gives_malformed = False  # what raises when it is recorded raises when it is replayed

    def new_core(self) -> SchedulerCore:
        self.records: list[Record] = []
        return RecordedCore(self.config, self.records.append)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        must_be_equal(self.core, replayed(self.config, self.records).core, self.now)
        super().teardown()
        must_be_equal(self.core, replayed(self.config, self.records).core, self.now)


TestRandomRuns = RecordedMachine.TestCase
TestRandomRuns.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


class Tape:
    """Notes what a scenario's connector answers, or answers what was noted."""

    def __init__(self, connector: Connector) -> None:
        self.connector, self.answers, self.plays = connector, deque[Any](), False

    def _of(self, name: str, *arguments: Any) -> Any:
        if self.plays:
            return self.answers.popleft()
        self.answers.append(getattr(self.connector, name)(*arguments))
        return self.answers[-1]

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        return self._of("matched", request, num_local_tokens)  # type: ignore[no-any-return]

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> None:
        return None

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        return self._of("num_blocks_to_lease", request, block_size)  # type: ignore[no-any-return]


@pytest.mark.parametrize("file", [*FILES, *RANDOM], ids=lambda file: file.stem)
def test_every_scenario_replays(file: Path) -> None:
    """Drafts, LoRA, encoder inputs, grammars, async steps, failed loads, pauses, resets: whatever scenarios can say."""
    records: list[Record] = []
    made: list[tuple[RecordedCore, Tape | None]] = []

    def recorded(config: SchedulerConfiguration, connector: Connector | None) -> SchedulerCore:
        tape = None if connector is None else Tape(connector)
        made.append((RecordedCore(config, records.append, tape), tape))
        return made[0][0]

    observations = list(Driver(parse(file.read_bytes()), recorded).run())
    ((core, tape),) = made
    if tape is not None:
        tape.plays = True
    run = replayed(core.config, records, tape)
    assert run.num_inputs + sum(isinstance(record, Planned) for record in records) == len(records)
    must_be_equal(core, run.core, float(len(observations)))
    assert not (tape and tape.answers)


def test_plans_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    num_plans = random_run(tmp_path / "log", 1)
    assert num_plans > 500
    for seed in ("0", "1", "4711"):
        result = subprocess.run(
            [sys.executable, "-m", "tools.cli", "replay", str(tmp_path / "log")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert f"{tmp_path / 'log'}: identical: " in result.stdout
