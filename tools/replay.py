"""`kvyard replay`: gives a step log's inputs to the scheduler again and demands the plans that were recorded.

Starts within 0.3 s: it imports the pure core and nothing that serves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from actors.messages.errors import ConfigurationError
from actors.scheduling.records import Planned, RequestNote, StepNote
from actors.scheduling.replay import CoreRaised, PlanDiffers, Replay
from actors.step_log.format import StepLogError
from actors.step_log.reader import StepLogReader, read
from tools.replay_state import render


@click.command()
@click.argument("file", metavar="LOG", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--until", type=click.IntRange(min=0), metavar="STEP", help="stop when STEP is planned; show the state")
def replay(file: Path, until: int | None) -> None:
    """Run the scheduler over a step log (--step-log) again.

    Exit 0: every plan is byte for byte the recorded one. Exit 1: a plan differs, or the core raises; the message names
    the first field and row. Exit 2: LOG is not a step log, or damaged, and the message names the byte; or its header
    has a configuration that no scheduler can have.
    """
    try:
        with read(file) as log:
            _replay(log, until)
    except StepLogError as error:
        click.echo(f"kvyard replay: {error}", err=True)
        sys.exit(2)
    except ConfigurationError as error:
        click.echo(f"kvyard replay: {file}: the configuration in its header is impossible: {error}", err=True)
        sys.exit(2)


def _replay(log: StepLogReader, until: int | None) -> None:
    run = Replay(log.header)
    if until == 0:
        click.echo(render(run))
        return
    for number, record in enumerate(log):
        try:
            run.take(record)
        except PlanDiffers as difference:
            click.echo(f"{log.path}: record {number}: {difference}", err=True)
            sys.exit(1)
        except CoreRaised as raised:
            goes_on = any(not isinstance(later, RequestNote | StepNote) for later in log)
            recorded = "the recorded run went on" if goes_on else "the log ends here: the recorded run raised it, too"
            click.echo(f"{log.path}: record {number}, after step {run.last_step}: {raised}; {recorded}", err=True)
            sys.exit(1)
        if until is not None and isinstance(record, Planned) and run.last_step >= until:
            click.echo(render(run))
            return
    if until is not None:
        click.echo(f"{log.path}: step {until} is not in the log; its last is {run.last_step}", err=True)
        sys.exit(1)
    click.echo(
        f"{log.path}: identical: {run.num_steps} steps, {run.num_inputs} inputs, {run.num_requests} requests, "
        f"{run.now - log.header.started:.3f} s; {'without its end' if log.truncated else 'whole'}"
    )


if __name__ == "__main__":
    replay()
