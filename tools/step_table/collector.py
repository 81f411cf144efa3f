"""Steps that are being filled: rows and moments go to the step they belong to, whole steps come out in order.

Invariant: what a request holds is the sum of what its rows allocated and freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from actors.scheduling.records import StepNote
from tools.step_table.blocks import BlockChange
from tools.step_table.rows import Step, StepRow

FREED = " blocks freed"


class Collector:
    def __init__(self, only: str | None = None) -> None:
        """`only`: rows of this request alone."""
        self.when = ""  # of what comes next; whoever drives the core sets it
        self.only = only
        self.heard: list[str] = []  # events of the request `only`; whoever follows it takes them
        self.expects_notes = False  # a step's StepNote comes after its result, and after plans that follow at once
        self._open: deque[Step] = deque([Step(number=0)])
        self._by_number: dict[int, Step] = {}  # those in flight
        self._held: dict[str, int] = {}
        self._added: dict[str, None] = {}  # no row since

    @property
    def newest(self) -> Step:
        return self._open[-1]

    def begin(self, step: Step) -> None:
        self._open.append(step)
        if step.has_rows:
            step.in_flight = True
            self._by_number[step.number] = step

    def returned(self, number: int) -> Step | None:
        step = self._by_number.pop(number, None)
        if step is not None:
            step.in_flight = False
        return step

    def noted(self, note: StepNote) -> None:
        for step in self._open:
            if step.has_rows and step.number == note.step:
                step.note = note

    def tell(self, what: str, step: Step | None = None) -> None:
        (step or self.newest).tell(self.when, what)

    def added(self, request_id: str) -> None:
        self.tell(f"add {request_id}")
        self._added[request_id] = None

    def put(self, step: Step, row: StepRow) -> None:
        if self.only not in (None, row.request_id):
            return
        if row.request_id == self.only:
            self.heard += row.events
        if row.request_id in self._added:
            del self._added[row.request_id]
            row.events.insert(0, "added")
        row.blocks_held = self.held(row.request_id)
        step.rows[row.request_id] = row

    def row(self, step: Step, request_id: str) -> StepRow:
        """A request that had ended before the step was planned, or came after, gets a row of its own."""
        row = step.rows.get(request_id)
        if row is None:
            row = StepRow(
                step=step.label,
                request_id=request_id,
                queue="",
                status="",
                num_computed_tokens=0,
                num_computed_tokens_after=0,
                num_known_tokens=0,
            )
            self.put(step, row)
        return row

    def event(self, step: Step, request_id: str, text: str) -> None:
        row = self.row(step, request_id)
        row.events.append(text)
        if request_id == self.only:
            self.heard.append(text)

    def blocks(self, step: Step, changes: Mapping[str, BlockChange]) -> None:
        for request_id, change in changes.items():
            row = self.row(step, request_id)
            row.blocks_allocated += change.allocated
            row.blocks_shared += change.shared
            row.blocks_freed += change.freed
            row.blocks_kept += change.kept
            held = self.held(request_id) + change.allocated - change.freed
            if held:
                self._held[request_id] = row.blocks_held = held
            else:
                self._held.pop(request_id, None)
                row.blocks_held = 0
            if change.freed and request_id == self.only:
                self.heard.append(f"{change.freed}{FREED}")
            for text in change.turned:
                self.event(step, request_id, text)

    def held(self, request_id: str) -> int:
        return self._held.get(request_id, 0)

    def start_with(self, held: Mapping[str, int]) -> None:
        self._held = dict(held)

    def take(self) -> list[Step]:
        """Steps that nothing can be added to any more, in order."""
        whole = []
        while len(self._open) > 1 and self._is_whole(self._open[0]):
            whole.append(self._open.popleft())
        return [step for step in whole if step.number or step.moments]

    def _is_whole(self, step: Step) -> bool:
        return not step.in_flight and not (self.expects_notes and step.has_rows and step.note is None)

    def end(self) -> list[Step]:
        """All others, after the last input: those whose result never came are in flight."""
        rest = list(self._open)
        self._open.clear()
        return rest
