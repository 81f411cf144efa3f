"""When a member of the deployment that has ended is started again. Pure: times are handed in, in seconds.

0.5 s after the first end, twice as long after each further one, at most 30 s; from 0.5 s again once it has been well
for 60 s. A member that cannot even start for a reason that a person must mend is given up.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
FORGIVEN_AFTER_S = 60.0
# What the tools exit with for a wrong flag, an unusable model, a port in use.
HOPELESS_EXIT_CODES = frozenset({1, 2})


@dataclass
class RestartPolicy:
    ever_ready: bool = False
    _failures: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """The member answers."""
        self.ever_ready, self._ready_at = True, now

    def ended(self, exit_code: int, now: float) -> float | None:
        """Seconds to wait before it is started again; None: do not, it has never been ready and says why."""
        if not self.ever_ready and exit_code in HOPELESS_EXIT_CODES:
            return None
        if self._ready_at is not None and now - self._ready_at >= FORGIVEN_AFTER_S:
            self._failures = 0
        self._ready_at = None
        back_off = min(FIRST_BACK_OFF_S * 2.0**self._failures, LONGEST_BACK_OFF_S)
        self._failures = min(self._failures + 1, 10)  # far beyond the longest back-off
        return back_off
