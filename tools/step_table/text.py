"""The step table as text: a line for each step, its moments in their order, then a line per request.

Wide when there is room (or when nobody looks: a pipe gets whole lines); on a narrow terminal the step stands only in
its own line, and what happened goes below the row. Columns of features that are off are left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import click

from actors.configuration import SchedulerConfiguration
from actors.scheduling.request import Status
from tools.step_table.rows import Step, StepRow

WIDE = 118  # characters from which on the step and the whole status have a column
_LEAST_TEXT = 18
_MOMENT = 12
_SHORT_STATUS = {
    "WAITING": "WAIT",
    "WAITING_FOR_GRAMMAR": "GRAMMAR",
    "WAITING_FOR_REMOTE_KVS": "REMOTE",
    "RUNNING": "RUN",
    "PREEMPTED": "PREEMPT",
    "FINISHED": "END",
}


class Column(NamedTuple):
    name: str
    title: str
    width: int
    is_number: bool = True

    def fit(self, text: str) -> str:
        return text.rjust(self.width) if self.is_number else text.ljust(self.width)


class TextTable:
    def __init__(
        self, config: SchedulerConfiguration, *, width: int | None, longest_id: int, folds: bool = False
    ) -> None:
        """`width` None: not a terminal. `folds`: who waits as in the step before is only counted."""
        self._width, self._folds = width, folds
        self._is_wide = width is None or width >= WIDE
        self._last: dict[str, tuple[object, ...]] = {}
        others = _columns(config, width, self._is_wide)
        self._id_width = min(max(longest_id, 7), 46)
        if width is not None:
            room = width - sum(column.width + 1 for column in others)
            self._id_width = max(min(self._id_width, 20 if self._is_wide else room), 7)
        at = 1 if self._is_wide else 0  # behind the step
        self._columns = [*others[:at], Column("request", "request", self._id_width, False), *others[at:]]
        self._fixed = sum(column.width + 1 for column in self._columns)
        self._is_below = width is not None and width - self._fixed < _LEAST_TEXT

    def header(self) -> str:
        line = " ".join(column.fit(column.title) for column in self._columns)
        return click.style(line + ("" if self._is_below else " what happened; why it was not scheduled"), bold=True)

    def lines(self, step: Step) -> Iterator[str]:
        yield from self.heading(_step_line(step))
        for moment in step.moments:
            yield from self._wrapped(f"{moment.when:>{_MOMENT}}  {moment.what}", _MOMENT + 2)
        num_folded = 0
        for row in step.rows.values():
            if self._folds and self._is_as_before(row):
                num_folded += 1
            else:
                yield from self._row_lines(row)
        if num_folded:
            yield click.style(f"{'':6} … and {num_folded} more as in their rows before", dim=True)

    def heading(self, text: str) -> Iterator[str]:
        for line in self._wrapped(text, 8):
            yield click.style(line, bold=True)

    def _is_as_before(self, row: StepRow) -> bool:
        if row.status == Status.FINISHED.name:
            self._last.pop(row.request_id, None)
            return False
        key = (row.queue, row.status, row.num_computed_tokens_after, row.why)
        was = self._last.get(row.request_id)
        self._last[row.request_id] = key
        return row.is_quiet and was == key

    def _row_lines(self, row: StepRow) -> Iterator[str]:
        cells = self._cells(row)
        line = " ".join(column.fit(cells[column.name]) for column in self._columns)
        text = what_happened(row)
        if self._width is None or self._fixed + len(text) <= self._width:
            lines = [f"{line} {text}".rstrip()]
        else:
            first, *rest = textwrap.wrap(text, max(self._width - self._fixed, 1))
            if self._is_below or len(rest) > 1:
                below = textwrap.wrap(text, self._width, initial_indent=" " * 8, subsequent_indent=" " * 8)
                lines = [line, *below]
            else:
                lines = [f"{line} {first}", *(" " * self._fixed + part for part in rest)]
        style = {"dim": True} if row.is_quiet else {"fg": "red"} if _is_bad(row) else {}
        for each in lines:
            yield click.style(each, **style) if style else each

    def _cells(self, row: StepRow) -> dict[str, str]:
        before, after = row.num_computed_tokens, row.num_computed_tokens_after
        known = str(row.num_known_tokens)
        parts = f"+{row.num_drafts}d" * bool(row.num_drafts) + f"+{row.num_placeholders}p" * bool(row.num_placeholders)
        drafts = "" if not row.num_drafts_scheduled else str(row.num_drafts_scheduled)
        if row.num_drafts_accepted is not None:
            drafts = f"{row.num_drafts_accepted}/{row.num_drafts_scheduled}"
        allocated, freed = row.blocks_allocated, row.blocks_freed
        had_none = not row.status  # it had ended before the step
        return {
            "step": "–" if row.step is None else str(row.step),
            "request": short(row.request_id, self._id_width),
            "queue": row.queue or "–",
            "status": row.status if self._width is None else _SHORT_STATUS.get(row.status, row.status),
            "computed": "" if had_none else str(before) if before == after else f"{before}→{after}",
            "with spec": "" if had_none else known + parts,
            "hit": str(row.num_prefix_hit_tokens or ""),
            "remote": str(row.num_remote_tokens or ""),
            "tokens": str(row.num_scheduled_tokens or ""),
            "drafts": drafts,
            "blocks": f"+{allocated}" * bool(allocated) + f"−{freed}" * bool(freed),
            "held": str(row.blocks_held),
        }

    def _wrapped(self, line: str, indent: int) -> Iterator[str]:
        if self._width is None:
            yield line
        else:
            yield from textwrap.wrap(line, self._width, subsequent_indent=" " * indent, drop_whitespace=False) or [line]


def _columns(config: SchedulerConfiguration, width: int | None, is_wide: bool) -> list[Column]:
    """All but the request's. Computed is two numbers of tokens; spec is one, with drafts and placeholders."""
    most = len(str(config.max_model_len))
    room = 9 if is_wide else 7
    return [
        *([Column("step", "step", 6)] if is_wide else []),
        Column("queue", "queue", 7, False),
        Column("status", "status", 22 if width is None else 11 if is_wide else 7, False),
        Column("computed", "computed", max(2 * most + 1, 8)),
        Column("with spec", "with spec" if is_wide else "spec", max(room, most)),
        *([Column("hit", "hit", max(most, 3))] if config.prefix_caching else []),
        *([Column("remote", "remote" if is_wide else "load", max(most, 6 if is_wide else 4))] * config.kv_connector),
        Column("tokens", "tokens" if is_wide else "sched", 6 if is_wide else 5),
        *([Column("drafts", "drafts" if is_wide else "acc", 6 if is_wide else 3)] if config.num_spec_tokens else []),
        Column("blocks", "blocks", 6),
        Column("held", "held", 4),
    ]


def _step_line(step: Step) -> str:
    if step.number == 0:
        return "before the first step"
    blocks = f"free blocks {step.free_before} → {step.free_after}"
    if not step.has_rows:
        return f"no step: nothing to compute, {blocks}"
    parts = [
        f"step {step.number}: {step.num_scheduled_tokens} of {step.token_budget} tokens",
        f"{step.num_scheduled_requests} request{'s' * (step.num_scheduled_requests != 1)}",
        blocks,
    ]
    if step.in_flight:
        parts.append("IN FLIGHT: its result never came")
    if step.note is not None:
        parts.append(
            f"schedule {step.note.schedule_s * 1e3:.2f} ms, execute {step.execute_s * 1e3:.2f}, "
            f"sample {step.sample_s * 1e3:.2f}"
        )
    return ", ".join(parts)


def what_happened(row: StepRow) -> str:
    parts = list(row.events)
    if row.blocks_shared:
        parts.append(f"{row.blocks_shared} of its blocks shared")
    if row.blocks_kept:
        parts.append(f"{row.blocks_kept} of the freed stay with others")
    if row.token_ids:
        parts.append(f"out {' '.join(map(str, row.token_ids))}")
    if row.why:
        parts.append(row.why if row.status == Status.FINISHED.name else f"waits: {row.why}")
    return "; ".join(parts)


def short(request_id: str, width: int) -> str:
    """Its beginning, of which `--request` understands as much as is unique."""
    return request_id if len(request_id) <= width else f"{request_id[: width - 1]}…"


def _is_bad(row: StepRow) -> bool:
    return any(
        event.startswith(("preempted", "ended: ", "blocks did not arrive", "load failed")) for event in row.events
    )
