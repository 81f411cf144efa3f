"""One row of a table of figures: what was measured, against what, and whether that is good enough. Pure.

A row has either two figures, ours and theirs, of which the ratio is judged (the median of the rounds' own ratios: both
of a round were measured within minutes of one another), or ours alone, which is judged itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    key: str  # what --only takes
    work: str
    unit: str  # of the figures
    against: str = ""  # whose figure stands beside ours; "": the figure itself is judged
    less_is_better: bool = False
    goal: float | None = None  # of the ratio, else of the figure
    floor: float | None = None

    def limit(self, value: float | None) -> str:
        """As a goal or floor is written: "≥ 2.6×", "≤ 5 %"."""
        if value is None:
            return ""
        unit = "×" if self.against else f" {self.unit}"
        return f"{'≤' if self.less_is_better else '≥'} {value:g}{unit}"


class Measured(msgspec.Struct, frozen=True):
    """One figure per round, in the order of the rounds. `missing`: why there is none;
    its first line goes into the table."""

    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    note: str = ""
    missing: str = ""

    def judged(self, row: Row) -> list[float]:
        """What the row's goal is about, one per round. Raises ValueError when a figure has no counterpart."""
        if not row.against:
            return list(self.ours)
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


Measure = Callable[[int], Measured]  # of a number of rounds


def failed(error: Exception) -> Measured:
    return Measured(missing=f"failed: {str(error) or type(error).__name__}")


def verdict(row: Row, measured: Measured) -> str:
    if measured.missing:
        return measured.missing.splitlines()[0]
    if row.goal is None or row.floor is None:
        return ""
    value = statistics.median(measured.judged(row))
    better = value.__le__ if row.less_is_better else value.__ge__
    return "goal" if better(row.goal) else "floor" if better(row.floor) else "below its floor"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS = ("work", "against", "kvyard", "theirs", "ratio", "rounds", "goal", "floor", "verdict")
_TEXTS = ("work", "against", "verdict")


def cells(row: Row, measured: Measured) -> tuple[str, ...]:
    """One text for each of COLUMNS. "rounds" is the least and the most of what is judged."""
    work = f"{row.work}, {row.unit}"
    limits = (row.limit(row.goal), row.limit(row.floor), verdict(row, measured))
    if measured.missing:
        return (work, row.against, "", "", "", "", *limits)
    judged = measured.judged(row)
    theirs = ratio = ""
    if row.against:
        theirs, ratio = figure(statistics.median(measured.theirs)), f"{statistics.median(judged):.2f}"
    spread = " – ".join(figure(value) for value in (min(judged), max(judged)))
    return (work, row.against, figure(statistics.median(measured.ours)), theirs, ratio, spread, *limits)


def markdown(rows: dict[Row, Measured]) -> str:
    """The table as docs/benchmarks.md has it, with what is to be said of single rows below. Columns are aligned."""
    lines = [COLUMNS, *(cells(row, measured) for row, measured in rows.items())]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "| " + " | ".join(_padded(*cell) for cell in zip(COLUMNS, line, widths, strict=True)) + " |" for line in lines
    ]
    rule = (
        ("-" * width if name in _TEXTS else "-" * (width - 1) + ":")
        for name, width in zip(COLUMNS, widths, strict=True)
    )
    text.insert(1, "| " + " | ".join(rule) + " |")
    notes = [f"- {row.work}: {measured.note}" for row, measured in rows.items() if measured.note]
    return "\n".join([*text, *(["", *notes] if notes else [])]) + "\n"


def _padded(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in _TEXTS else cell.rjust(width)
