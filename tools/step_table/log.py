"""The steps of a step log: the log is replayed on a core that is watched, record by record, and nothing of it is kept.

A replay that differs from the recorded run ends the table there (ReplayEnded).
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.messages.errors import KvyardError
from actors.scheduling.records import Planned, Record, RequestNote, StepNote
from actors.scheduling.replay import CoreRaised, PlanDiffers, Replay
from actors.step_log.reader import StepLogReader
from tools.step_table.collector import Collector
from tools.step_table.rows import Step
from tools.step_table.watched import WatchedCore


class ReplayEnded(KvyardError):
    """A plan of the replay is not the recorded one, or the core raised."""


class WatchedReplay:
    def __init__(self, log: StepLogReader, *, first: int = 1, only: str | None = None) -> None:
        """`first`: watch from this step on; before it the replay costs only itself."""
        self.collector = Collector(only)
        self.core = WatchedCore(log.header.configuration, collector=self.collector)
        self.core.watch(first <= 1)
        self._run = Replay(log.header)
        self._run.core = self.core
        self._log, self._first = log, first

    @property
    def last_step(self) -> int:
        return self._run.last_step

    def records(self) -> Iterator[Record]:
        """Each record, after the replay took it. Raises ReplayEnded, and DamagedStepLog as the log does."""
        for number, record in enumerate(self._log):
            if isinstance(record, Planned) and record.plan.step >= self._first:
                self.core.watch(True)
            now = getattr(record, "now", None)
            if now is not None:
                self.collector.when = f"+{now - self._log.header.started:.6f}"
            try:
                self._run.take(record)
            except (PlanDiffers, CoreRaised) as error:
                raise ReplayEnded(
                    f"record {number}, after step {self.last_step}: {error}{self._goes_on(error)}"
                ) from None
            match record:
                case RequestNote():
                    self.collector.expects_notes = True
                case StepNote():
                    self.collector.noted(record)
            yield record

    def _goes_on(self, error: KvyardError) -> str:
        if isinstance(error, PlanDiffers):
            return ""
        goes_on = any(not isinstance(later, RequestNote | StepNote) for later in self._log)
        return "; the recorded run went on" if goes_on else "; the log ends here: the recorded run raised it, too"


def steps_of_log(replay: WatchedReplay, last: int | None = None) -> Iterator[Step]:
    """Up to step `last`. When the replay ends early, the steps so far come first."""
    ended: ReplayEnded | None = None
    try:
        for _ in replay.records():
            for step in replay.collector.take():
                if last is not None and step.number > last:
                    return
                yield step
    except ReplayEnded as error:
        ended = error
    for step in replay.collector.end():
        if last is None or step.number <= last:
            yield step
    if ended is not None:
        raise ended
