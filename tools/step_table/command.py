"""`kvyard steps --log`: the whole table, or one request's way, out of a step log. Answers the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from actors.messages.errors import ConfigurationError
from actors.scheduling.records import Added, Header, RequestNote
from actors.step_log.format import StepLogError
from actors.step_log.reader import read
from tools.step_table.log import ReplayEnded, WatchedReplay, steps_of_log
from tools.step_table.text import TextTable

_LONGEST_ID = 46
_LISTED = 10


class Wanted(NamedTuple):
    request: str | None  # an id or an X-Request-ID, or its unique beginning
    first: int
    last: int | None
    as_json: bool
    every_row: bool


class _NotThere(Exception):
    pass


def show_log(path: Path, wanted: Wanted, width: int | None) -> int:
    """0; 1: the replay differs; 2: the log cannot be read, or what is wanted is not in it."""
    try:
        if wanted.request is not None:
            return _follow(path, wanted.request, width)
        return _table(path, wanted, width)
    except (StepLogError, _NotThere) as error:
        text = str(error)
        click.echo(f"kvyard steps: {text if text.startswith(str(path)) else f'{path}: {text}'}", err=True)
        return 2
    except ConfigurationError as error:
        click.echo(f"kvyard steps: {path}: the configuration in its header is impossible: {error}", err=True)
        return 2
    except ReplayEnded as error:
        click.echo(f"{path}: {error}", err=True)
        return 1


def _table(path: Path, wanted: Wanted, width: int | None) -> int:
    with read(path) as log:
        replay = WatchedReplay(log, first=wanted.first)
        num_steps = 0
        encode = msgspec.json.Encoder().encode
        table = TextTable(log.header.configuration, width=width, longest_id=_LONGEST_ID, folds=not wanted.every_row)
        has_begun = wanted.as_json  # nothing is printed before there is something to show
        for step in steps_of_log(replay, wanted.last):
            num_steps += step.number > 0
            if wanted.as_json:
                for row in step.rows.values():
                    click.echo(encode(row))
            elif step.number or step.moments:
                if not has_begun:
                    for line in (*table.heading(_title(log.header)), table.header()):
                        click.echo(line)
                    has_begun = True
                for line in table.lines(step):
                    click.echo(line)
        if not num_steps:
            if wanted.first > 1:
                raise _NotThere(f"no step from {wanted.first} on; the last is {replay.last_step}")
            click.echo(f"{path}: no step was planned", err=wanted.as_json)
        if log.truncated and wanted.last is None:
            click.echo(f"{path}: the log has no end: its engine was killed, or still runs", err=True)
    return 0


def _title(header: Header) -> str:
    return (
        f"{header.engine_id} (role {header.role}, epoch {header.epoch}): async depth {header.async_depth},"
        f" {header.configuration.usable_blocks} blocks of {header.configuration.block_size} tokens;"
        f" times in seconds since the log began"
    )


def _follow(path: Path, wanted: str, width: int | None) -> int:
    from tools.step_table.timeline import Follower
    from tools.step_table.timeline_text import lines_of

    request_id = _find(path, wanted)
    ended: ReplayEnded | None = None
    with read(path) as log:
        replay = WatchedReplay(log, only=request_id)
        follower = Follower(request_id, replay.core)
        try:
            for record in replay.records():
                follower.take(record)
                replay.collector.take()
        except ReplayEnded as error:
            ended = error
        for life in follower.lives():
            for line in lines_of(life, log.header, width):
                click.echo(line)
    if ended is not None:
        raise ended
    return 0


def _find(path: Path, wanted: str) -> str:
    """The one request whose id, or whose X-Request-ID, is `wanted`, or begins with it. What is whole goes first."""
    traces: dict[str, str] = {}  # request id → X-Request-ID, of those that are not added yet
    found: dict[str, str] = {}  # request id → what it was found by
    with read(path) as log:
        for record in log:
            match record:
                case RequestNote():
                    traces[record.request_id] = record.trace_id
                case Added(request=request):
                    names = (request.request_id, traces.pop(request.request_id, ""))
                    by = next((name for name in names if name and name.startswith(wanted)), None)
                    if by is not None:
                        found[request.request_id] = by
    if wanted in found:
        return wanted
    if not found:
        raise _NotThere(f"no request's id or X-Request-ID is or begins with {wanted!r}")
    same = [request_id for request_id, by in found.items() if by == wanted]
    alike = same or list(found)
    if len(alike) == 1:
        return alike[0]
    what = f"the X-Request-ID of {len(alike)} requests" if same else f"the beginning of {len(alike)} ids"
    listed = [name if found[name] in (name, wanted) else f"{name} ({found[name]})" for name in alike[:_LISTED]]
    more = f" and {len(alike) - _LISTED} more" if len(alike) > _LISTED else ""
    raise _NotThere(f"{wanted!r} is {what}: {', '.join(listed)}{more}")
