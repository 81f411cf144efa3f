"""The step table of a scenario: the driver that checks scenarios runs a core that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from actors.configuration import SchedulerConfiguration
from actors.scheduling.connector import Connector
from tools.scenarios.driver import Driver, Observation
from tools.scenarios.format import Action, Scenario
from tools.step_table.collector import Collector
from tools.step_table.rows import Step
from tools.step_table.watched import WatchedCore


def steps_of_scenario(
    scenario: Scenario, observed: Callable[[Action, Observation, WatchedCore], None] = lambda *_: None
) -> Iterator[Step]:
    """`observed` is called after every action. Raises NotAScenario where an action is not possible."""
    collector = Collector()
    core: WatchedCore | None = None

    def make_core(config: SchedulerConfiguration, connector: Connector | None) -> WatchedCore:
        nonlocal core
        core = WatchedCore(config, connector, collector=collector)
        return core

    driver = Driver(scenario, make_core)
    assert core is not None
    run = driver.run()
    for index, action in enumerate(scenario.actions):
        collector.when = str(index)
        if action.remote is not None:
            for name, answer in action.remote.items():
                tokens = "does not know yet" if answer.tokens is None else f"has {answer.tokens} tokens"
                collector.tell(f"the connector {tokens} of {name}")
        observed(action, next(run), core)
        yield from collector.take()
    yield from collector.end()
