"""One request from HTTP to its last token: its wall time in the log, cut into stages without a gap or an overlap.

    arrival ─ API ─ submitted ─ admission ─ added ─ waiting (why) ─ step ─ between ─ step ─ … ─ end
    step:  schedule · hand-over · execute · sample · publish, less what a step before it covers already

Async steps overlap: a later one is planned while an earlier one runs. What both cover counts once, with the earlier.
Invariant: Σ `Span.seconds` of a life = end − arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from actors.messages.plan import StepPlan
from actors.messages.request import EngineRequest
from actors.scheduling.records import Added, Planned, Record, RequestNote, StepApplied, StepNote
from tools.step_table.collector import FREED
from tools.step_table.rows import StepRow
from tools.step_table.watched import WatchedCore

BETWEEN = "between steps"


class Shapes(NamedTuple):
    """Of the request's row as the runner sees it, and of the whole step."""

    num_tokens: int
    first_position: int
    num_blocks: int  # of the block table
    num_sampled: int
    slots: list[int]  # block_id · block_size + offset of every scheduled token
    step_tokens: int
    step_rows: int
    step_sampled_rows: int
    is_new: bool  # the worker gets all known tokens and the whole block table


class OwnStep(msgspec.Struct):
    """Times on the engine's clock, seconds. Without a note, the plan's and the result's times stand for those in it."""

    number: int
    planned: float
    row: StepRow
    shapes: Shapes
    schedule_s: float = 0.0
    dispatched: float = 0.0
    returned: float | None = None  # None: in flight
    published: float = 0.0
    execute_s: float = 0.0
    sample_s: float = 0.0
    has_note: bool = False

    @property
    def hand_over_s(self) -> float:
        """On the way to the worker and back, and behind the steps before it in the worker."""
        return 0.0 if self.returned is None else self.returned - self.dispatched - self.execute_s - self.sample_s

    @property
    def publish_s(self) -> float:
        return 0.0 if self.returned is None else self.published - self.returned

    @property
    def total_s(self) -> float:
        return 0.0 if self.returned is None else self.published - self.planned


class Span(msgspec.Struct):
    """`step` None: a wait, or a stage before the scheduler."""

    stage: str
    start: float
    seconds: float
    text: str = ""
    step: OwnStep | None = None


class Life(msgspec.Struct):
    """An id may be used again after its request has ended: that is another life."""

    request: EngineRequest
    submitted: float | None
    added: float
    trace_id: str = ""
    steps: list[OwnStep] = []
    marks: list[tuple[float, str]] = []  # from then on it waited because of this
    events: list[tuple[float, str]] = []
    ended: float | None = None  # None: it is live at the end of the log
    last_seen: float = 0.0

    @property
    def end(self) -> float:
        """Its last token was published, or what ended it happened; of a live one, the last that is known."""
        published = [step.published for step in self.steps if step.returned is not None]
        return max([self.last_seen if self.ended is None else self.ended, *published])

    @property
    def wall_s(self) -> float:
        return self.end - self.request.arrival

    def spans(self) -> Iterator[Span]:
        arrival = self.request.arrival
        if self.submitted is None:
            yield Span(
                "API", arrival, self.added - arrival, "arrival → added, admission in it: the log has no note of it"
            )
        else:
            yield Span("API", arrival, self.submitted - arrival, "arrival → submitted")
            yield Span("admission", self.submitted, self.added - self.submitted, "submitted → added")
        cursor = since = self.added
        name = "until the next plan"
        for step in self.steps:
            if step.returned is None:
                continue
            start = max(step.planned, cursor)
            yield from self._waits(cursor, start, since, name)
            yield Span("step", start, max(step.published - start, 0.0), step=step)
            cursor, since, name = max(cursor, step.published), step.returned, BETWEEN
        yield from self._waits(cursor, self.end, since, name)

    def _waits(self, start: float, end: float, since: float, name: str) -> Iterator[Span]:
        """The marks from `since` on say why; equal ones that follow each other are one."""
        if end <= start:
            return
        cuts = [(start, name)]
        for when, why in self.marks:
            if since <= when < end and why != cuts[-1][1]:
                if when > start:
                    cuts.append((when, why))
                else:
                    cuts[-1] = (start, why)
        for (begins, why), (until, _) in zip(cuts, [*cuts[1:], (end, "")], strict=True):
            yield Span("between" if why == BETWEEN else "waiting", begins, until - begins, why)


class Follower:
    """Takes each record after the watched core took it."""

    def __init__(self, request_id: str, core: WatchedCore) -> None:
        self._id, self._core = request_id, core
        self._lives: list[Life] = []
        self._note_of_it: RequestNote | None = None  # of a life that begins next
        self._flying: dict[int, OwnStep] = {}
        self._unnoted: dict[int, OwnStep] = {}
        self._blocks: list[int] = []
        self._now = 0.0

    def lives(self) -> list[Life]:
        for life in self._lives:
            life.last_seen = max(life.last_seen, self._now)
        return self._lives

    def take(self, record: Record) -> None:
        self._now = getattr(record, "now", self._now)
        match record:
            case RequestNote(request_id=self._id):
                self._note_of_it = record
            case Added() if record.request.request_id == self._id:
                self._lives.append(_life(record, self._note_of_it))
                self._note_of_it = None
            case Planned():
                self._plan(record)
            case StepApplied():
                self._apply(record)
            case StepNote():
                self._note(record)
            case _:
                pass
        self._hear(isinstance(record, Planned))

    def _plan(self, record: Planned) -> None:
        row = self._core.collector.newest.rows.get(self._id)
        if row is None or not self._lives:
            return
        life, plan = self._lives[-1], record.plan
        if self._id in plan.request_ids:
            step = OwnStep(plan.step, record.now, row, self._shapes(plan))
            step.dispatched = record.now
            life.steps.append(step)
            self._flying[plan.step] = step
        elif not self._flying:
            life.marks.append((record.now, row.why))

    def _shapes(self, plan: StepPlan) -> Shapes:
        """From the plan alone: what the worker is told is what is shown."""
        place = plan.request_ids.index(self._id)
        counts, computed, sampled, new = (
            _ints(column)
            for column in (
                plan.num_scheduled_tokens,
                plan.num_computed_tokens,
                plan.num_sampled,
                plan.num_new_blocks,
            )
        )
        first = sum(new[:place])
        blocks = _ints(plan.new_block_ids)[first : first + new[place]]
        is_new = any(each.request_id == self._id for each in plan.new_requests)
        if is_new:
            self._blocks.clear()
        self._blocks += blocks
        size = self._core.config.block_size
        positions = range(computed[place], computed[place] + counts[place])
        return Shapes(
            num_tokens=counts[place],
            first_position=computed[place],
            num_blocks=len(self._blocks),
            num_sampled=sampled[place],
            slots=[self._blocks[position // size] * size + position % size for position in positions],
            step_tokens=sum(counts),
            step_rows=len(counts),
            step_sampled_rows=sum(1 for number in sampled if number),
            is_new=is_new,
        )

    def _apply(self, record: StepApplied) -> None:
        result = record.result
        step = None if result is None else self._flying.pop(result.step, None)
        if step is not None and result is not None:
            step.returned = step.published = record.now
            step.execute_s, step.sample_s = result.execute_s, result.sample_s
            self._unnoted[step.number] = step

    def _note(self, note: StepNote) -> None:
        step = self._unnoted.pop(note.step, None)
        if step is not None:
            step.has_note = True
            step.planned = note.dispatched - note.schedule_s
            step.schedule_s, step.dispatched = note.schedule_s, note.dispatched
            step.returned, step.published = note.returned, note.published

    def _hear(self, is_plan: bool) -> None:
        """Events of the request, with their time; after its end they are what became of its blocks."""
        heard, self._core.collector.heard = self._core.collector.heard, []
        if not self._lives:
            return
        life = self._lives[-1]
        life.events += [(self._now, text) for text in heard]
        told = [text for text in heard if not text.endswith(FREED)]
        if told and not is_plan and life.ended is None:
            life.marks.append((self._now, f"{'; '.join(told)}: until the next plan"))
        if life.ended is None and self._core.live(self._id) is None:
            life.ended = self._now


def _life(added: Added, note: RequestNote | None) -> Life:
    if note is None:
        return Life(added.request, None, added.now)
    return Life(added.request, note.submitted, added.now, note.trace_id)


def _ints(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()
