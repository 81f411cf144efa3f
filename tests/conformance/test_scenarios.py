"""Every scenario agrees, field by field. The expected values were recorded on the reference scheduler (vLLM 0.25.1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.scenarios.driver import Driver, first_difference
from tools.scenarios.format import parse

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.json"))
ROWS = sorted((FOLDER / "rows").glob("*.json"))
RANDOM = sorted((FOLDER / "random").glob("*.json"))


def test_the_scenarios_are_here() -> None:
    assert (len(FILES), len(ROWS), len(RANDOM)) == (54, 43, 100)


@pytest.mark.parametrize("file", [*FILES, *ROWS, *RANDOM], ids=lambda file: file.stem)
def test_scenario_agrees(file: Path) -> None:
    scenario = parse(file.read_bytes())
    assert any(action.expect for action in scenario.actions)
    for index, (action, observation) in enumerate(zip(scenario.actions, Driver(scenario).run(), strict=True)):
        assert first_difference(action, observation) is None, f"actions[{index}] {action.kind}"
