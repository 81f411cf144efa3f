"""How much of the executor's waiting was in vain: while it had nothing to do, requests were there that could have run.

Pure; times are seconds of the engine's clock, waits come as durations, since a worker's clock need not be ours. A
request counts from when the scheduler has seen it, and as long as it runs, also while its step's result is on the way:
between two steps that is the very time that is lost. Parked requests do not count.
"""

from __future__ import annotations


class Idleness:
    def __init__(self) -> None:
        self._runnable_since: float | None = None
        self._dispatched: dict[int, float] = {}  # step -> since when there was work without a break

    def runnable(self, is_work_there: bool, now: float) -> None:
        if not is_work_there:
            self._runnable_since = None
        elif self._runnable_since is None:
            self._runnable_since = now

    def step_dispatched(self, step: int, now: float) -> None:
        self.runnable(True, now)
        assert self._runnable_since is not None
        self._dispatched[step] = self._runnable_since

    def step_completed(self, step: int, waited: float, busy: float, now: float) -> float:
        """How much of `waited`, which ended when the step's `busy` seconds began, was in vain. At most: the result's
        way back counts as if the step had begun later."""
        began = now - busy
        return min(waited, max(0.0, began - self._dispatched.pop(step)))
