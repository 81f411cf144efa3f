"""`kvyard steps`: the step table of a scheduler scenario, or of a step log; or checks a scenario, or prints it as JSON.

Starts within 0.3 s: it imports the pure core and nothing that serves.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from tools.scenarios.driver import Driver, core_configuration, first_difference
from tools.scenarios.format import NotAScenario, Scenario, parse

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", type=EXISTING, required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="FILE: one observation per action, one a line; LOG: one row a line"
)
@click.option("--check", "checks", is_flag=True, help="FILE: compare every expect; exit 1 at the first difference")
@click.option("--log", type=EXISTING, metavar="LOG", help="the table of a step log (--step-log of an engine)")
@click.option(
    "--request",
    metavar="ID",
    help="LOG: one request from HTTP to token; ID: its id or X-Request-ID, or a unique beginning",
)
@click.option("--from", "first", type=click.IntRange(min=1), metavar="STEP", help="LOG: begin with this step")
@click.option("--to", "last", type=click.IntRange(min=1), metavar="STEP", help="LOG: end with this step")
@click.option("--all", "every_row", is_flag=True, help="LOG: also the rows of who waits as in the step before")
def steps(
    file: Path | None,
    as_json: bool,
    checks: bool,
    log: Path | None,
    request: str | None,
    first: int | None,
    last: int | None,
    every_row: bool,
) -> None:
    """Print what the scheduler did, one row per request and step: for the scenario in FILE, or for a step log.

    A scenario runs without model, network and clock; a log is replayed, and each plan must be the recorded one.

    Exit 1: an expect differs (with --check), or the replay differs. Exit 2: FILE is not a scenario (the message names
    the JSON path at fault), LOG is not a step log or damaged, or the step or request is not in it.
    """
    if log is not None:
        from tools.step_table.command import Wanted, show_log

        if file is not None:
            raise click.UsageError("give either a scenario FILE or --log LOG, not both")
        if checks:
            raise click.UsageError("--check is for a scenario; `kvyard replay LOG` checks a step log")
        if request is not None and (first or last or as_json):
            raise click.UsageError("--request follows the request from its first to its last step: give it alone")
        if first and last and last < first:
            raise click.UsageError(f"--to {last} is before --from {first}")
        sys.exit(show_log(log, Wanted(request, first or 1, last, as_json, every_row), width()))
    if file is None:
        raise click.UsageError("give a scenario FILE, or --log LOG")
    if request is not None or first or last or every_row:
        raise click.UsageError("--request, --from, --to and --all are for a step log: give it with --log")
    sys.exit(_scenario(file, as_json, checks))


def width() -> int | None:
    """None: nobody looks."""
    return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else None


def _scenario(file: Path, as_json: bool, checks: bool) -> int:
    content = file.read_bytes()
    if content.startswith(b"KVYSTEP"):
        click.echo(f"{file}: a step log, not a scenario: use --log {file}", err=True)
        return 2
    try:
        scenario = parse(content)
        if as_json or checks:
            return _observe(file, scenario, as_json, checks)
        _table(scenario)
    except NotAScenario as error:
        click.echo(f"{file}: {error}", err=True)
        return 2
    return 0


def _table(scenario: Scenario) -> None:
    from tools.step_table.scenario import steps_of_scenario
    from tools.step_table.text import TextTable

    longest = max((len(name) for name in scenario.requests), default=0)
    table = TextTable(core_configuration(scenario.config), width=width(), longest_id=longest)
    click.echo(table.header())
    for step in steps_of_scenario(scenario):
        for line in table.lines(step):
            click.echo(line)


def _observe(file: Path, scenario: Scenario, as_json: bool, checks: bool) -> int:
    num_compared = 0
    for index, (action, observation) in enumerate(zip(scenario.actions, Driver(scenario).run(), strict=True)):
        if as_json:
            click.echo(json.dumps(observation))
        difference = first_difference(action, observation) if checks else None
        if difference is not None:
            field, expected, observed = difference
            click.echo(
                f"{file}: actions[{index}] {action.kind}: {field}: expected {json.dumps(expected)},"
                f" observed {json.dumps(observed)}",
                err=True,
            )
            return 1
        num_compared += len(action.expect)
    if checks:
        click.echo(f"{file}: agrees ({num_compared} fields of {len(scenario.actions)} actions)", err=as_json)
    return 0


if __name__ == "__main__":
    steps()
