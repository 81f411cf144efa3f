"""`kvyard steps`: runs a scheduler scenario and shows, prints as JSON, or checks what every step does.

Starts within 0.3 s: it imports the pure core and nothing that serves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from tools.scenarios.driver import Driver, first_difference
from tools.scenarios.format import NotAScenario, parse
from tools.scenarios.table import render, rows_of


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print one observation object per action, one a line")
@click.option("--check", "checks", is_flag=True, help="compare every expect; exit 1 at the first difference")
def steps(file: Path, as_json: bool, checks: bool) -> None:
    """Run the scheduler scenario in FILE: no model, no network, no clock.

    Exit 1: an expect differs (with --check). Exit 2: FILE is not a scenario; the message names the JSON path at fault.
    """
    rows: list[tuple[str, ...]] = []
    num_planned = num_applied = num_compared = 0
    try:
        scenario = parse(file.read_bytes())
        for index, (action, observation) in enumerate(zip(scenario.actions, Driver(scenario).run(), strict=True)):
            if as_json:
                click.echo(json.dumps(observation))
            num_planned += action.kind == "schedule"
            num_applied += action.kind == "update"
            rows += rows_of(action, observation, index, num_planned if action.kind == "schedule" else num_applied)
            difference = first_difference(action, observation) if checks else None
            if difference is not None:
                field, expected, observed = difference
                click.echo(
                    f"{file}: actions[{index}] {action.kind}: {field}: expected {json.dumps(expected)},"
                    f" observed {json.dumps(observed)}",
                    err=True,
                )
                sys.exit(1)
            num_compared += len(action.expect)
    except NotAScenario as error:
        click.echo(f"{file}: {error}", err=True)
        sys.exit(2)
    if checks:
        click.echo(f"{file}: agrees ({num_compared} fields of {len(scenario.actions)} actions)", err=as_json)
    elif not as_json:
        click.echo(render(rows))


if __name__ == "__main__":
    steps()
