"""`kvyard steps` as a user runs it: table, JSON, check, and what a broken file gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tools.scenarios.driver import core_configuration
from tools.scenarios.format import parse
from tools.step_table.scenario import steps_of_scenario
from tools.step_table.text import TextTable
from tools.steps import steps

SCENARIO: dict[str, Any] = {
    "name": "two",
    "why": "a is done in two steps",
    "config": {"block_size": 4},
    "requests": {"a": {"prompt": [{"seed": 1, "len": 5}], "max_tokens": 2}},
    "actions": [
        {"add": ["a"]},
        {"schedule": {}, "expect": {"scheduled": {"a": 5}}},
        {"update": {}},
        {"schedule": {}},
        {"update": {"sampled": {"a": [9]}}, "expect": {"finished": {"a": "length"}, "output": {"a": [9]}}},
    ],
}


def run(tmp_path: Path, scenario: object, *flags: str) -> tuple[int, str, str]:
    file = tmp_path / "scenario.json"
    file.write_text(scenario if isinstance(scenario, str) else json.dumps(scenario))
    result = CliRunner().invoke(steps, [str(file), *flags])
    return result.exit_code, result.stdout, result.stderr


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    scenario: dict[str, Any] = json.loads(json.dumps(SCENARIO))
    place = scenario
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return scenario


def test_json_prints_one_observation_per_action(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, SCENARIO, "--json")
    observations = [json.loads(line) for line in out.splitlines()]
    assert (code, len(observations)) == (0, 5)
    # 5 tokens of prompt in blocks of 4 are 2 blocks; 10,000 is the default pool.
    assert observations[1] == {
        "scheduled": {"a": 5}, "new": ["a"], "resumed": [], "preempted": [], "spec": {}, "cached": {}, "loading": {},
        "running": ["a"], "waiting": [], "skipped": [], "status": {"a": "RUNNING"}, "computed": {"a": 5},
        "free_blocks": 9998,
    }  # fmt: skip


def test_the_table_has_a_row_per_request_and_step(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, SCENARIO)
    assert code == 0
    # 5 tokens are 2 blocks of 4; the 6th, the token 7 that came out of step 1, still fits the second.
    assert [" ".join(line.split()) for line in out.splitlines()[1:]] == [
        "before the first step",
        "0 add a",
        "step 1: 5 of 8192 tokens, 1 request, free blocks 10000 → 9998",
        "1 plan: 1 row; new a",
        "2 result of step 1",
        "1 a running RUNNING 0→5 5 5 +2 2 added; new; out 7",
        "step 2: 1 of 8192 tokens, 1 request, free blocks 9998 → 10000",
        "3 plan: 1 row",
        "4 result of step 2; a finished: length",
        "2 a – FINISHED 5→6 6 1 −2 0 finished: length; out 9",
    ]


def test_check_names_the_first_difference(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, SCENARIO, "--check")
    assert (code, "agrees (3 fields of 5 actions)" in out) == (0, True)
    code, _, err = run(tmp_path, changed(["actions", 4, "expect", "output"], {"a": [8]}), "--check")
    assert code == 1
    assert 'actions[4] update: output: expected {"a": [8]}, observed {"a": [9]}' in err


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["config", "block_sise"], 4, "$.config: Object contains unknown field `block_sise`"),
        (["config", "block_size"], "4", "$.config.block_size: Expected `int`, got `str`"),
        (["requests", "a", "max_tokens"], 0, "$.requests.a.max_tokens: Expected `int` >= 1"),
        (["requests", "a", "prompt"], [{"seed": 1, "len": 0}], "$.requests.a.prompt[0].len: Expected `int` >= 1"),
        (["actions", 0], {"add": ["b"]}, "$.actions[0].add[0]: no request 'b'"),
        (["actions", 0], {"add": ["a"], "schedule": {}}, "$.actions[0]: an action has one key beside expect"),
        (["actions", 1, "expect"], {"sheduled": {}}, "$.actions[1].expect.sheduled: not a field of an observation"),
        (["actions", 2], {"update": {"sampled": {"a": ["x"]}}}, "$.actions[2].update.sampled.a[0]: Expected `int`"),
        (["actions", 2], {"update": {"sampled": {"a": [1, 2]}}}, "$.actions[2].update.sampled.a: the step gives it"),
        (["actions", 2], {"update": {"received": ["a"]}}, "$.actions[2].update.received[0]: nothing of 'a' is under"),
        (["actions", 0], {"update": {}}, "$.actions[0].update: no step is planned"),
        (["requests", "a", "prompt", 0, "len"], 9000, "$.actions[0].add[0]: request 'a' can never run"),
    ],
)
def test_a_file_that_is_not_a_scenario(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    code, _, err = run(tmp_path, changed(path, value))
    assert code == 2
    assert message in err


def test_text_that_is_not_json(tmp_path: Path) -> None:
    """There is no JSON path to name: the line and the column are named."""
    file = tmp_path / "scenario.json"
    brace = "Expecting property name enclosed in double quotes"
    assert run(tmp_path, '{"name": "x",\n  oops') == (2, "", f"{file}: not JSON (line 2, column 3): {brace}\n")
    assert run(tmp_path, "# A title") == (2, "", f"{file}: not JSON (line 1, column 1): Expecting value\n")
    file.write_bytes(b'{"name": "\xff"}')
    result = CliRunner().invoke(steps, [str(file)])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{file}: not JSON: no text at byte 10\n")


def test_it_imports_nothing_that_serves() -> None:
    """It has to start within 0.3 s."""
    everything = "tools.steps, tools.step_table.scenario, tools.step_table.command, tools.step_table.timeline_text"
    heavy = {"torch", "aiohttp", "transformers", "asyncio", "rich", "numpy"}
    code = f"import sys, {everything}; print(sorted({heavy!r} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_the_table_fits_the_terminal(columns: int) -> None:
    """Every feature that has a column is on, and somebody waits for every reason."""
    scenario = parse(
        json.dumps(
            {
                **SCENARIO,
                "config": {"block_size": 4, "kv_connector": True, "prefix_caching": True, "num_spec_tokens": 3},
                "requests": {
                    "a": SCENARIO["requests"]["a"],
                    "a-request-with-a-long-name-of-its-own": {
                        **SCENARIO["requests"]["a"],
                        "lora": "x",
                        "structured": True,
                    },
                },
                "actions": [{"add": ["a", "a-request-with-a-long-name-of-its-own"]}, *SCENARIO["actions"][1:]],
            }
        ).encode()
    )
    table = TextTable(core_configuration(scenario.config), width=columns, longest_id=37)
    lines = [table.header(), *(line for step in steps_of_scenario(scenario) for line in table.lines(step))]
    plain = [click.unstyle(line) for line in lines]
    assert max(map(len, plain)) <= columns
    text = " ".join(" ".join(line.split()) for line in plain)
    assert "waits: its grammar is not ready" in text
