"""Health is own progress: what makes an engine unhealthy, as a pure verdict over what the actors report.

Peers are metrics, never one's own health (a crashed prefill engine must not take its decode engines along).
"""

from __future__ import annotations

import msgspec

SILENCE_S = 5.0  # an actor that has not answered its ping, or runnable requests without a plan, for longer
STEP_FACTOR = 10  # a step may take this many times the longest seen at its size, or its tokens at the warm-up's pace


class Health(msgspec.Struct, frozen=True):
    healthy: bool
    reason: str = ""


class Watchdog:
    """Fed by the SchedulerActor and the supervisor; times are seconds of the engine's clock."""

    def __init__(self, max_quarantined_blocks: int) -> None:
        self._max_quarantined_blocks = max_quarantined_blocks
        self._seconds_per_token = 0.0
        self._in_flight: dict[int, tuple[float, int]] = {}  # step -> (dispatched at, tokens)
        self._longest: dict[int, float] = {}  # size class -> seconds
        self._runnable_since: float | None = None
        self._quarantined = 0

    def warmed_up(self, seconds_per_token: float) -> None:
        """What the first step of a size is measured by: a large one may rightly take more than SILENCE_S."""
        self._seconds_per_token = seconds_per_token

    def step_dispatched(self, step: int, num_tokens: int, now: float) -> None:
        self._in_flight[step] = (now, num_tokens)
        self._runnable_since = None

    def step_completed(self, step: int, now: float) -> None:
        dispatched = self._in_flight.pop(step, None)
        if dispatched is not None:
            at, num_tokens = dispatched
            size = num_tokens.bit_length()
            self._longest[size] = max(self._longest.get(size, 0.0), now - at)

    def runnable(self, waiting_for_a_plan: bool, now: float) -> None:
        """Whether requests could run although no step is in flight. Parked requests do not count."""
        if not waiting_for_a_plan:
            self._runnable_since = None
        elif self._runnable_since is None:
            self._runnable_since = now

    def quarantined(self, blocks: int) -> None:
        self._quarantined = blocks

    def verdict(self, silences: dict[str, float], now: float) -> Health:
        """`silences`: actor name → seconds since its last answer."""
        for actor, silence in silences.items():
            if silence > SILENCE_S:
                return Health(False, f"actor {actor} has not answered for {silence:.1f} s")
        for step, (at, num_tokens) in self._in_flight.items():
            limit = self._limit(num_tokens)
            if now - at > limit:
                return Health(False, f"step {step} runs for {now - at:.1f} s; its limit is {limit:.1f} s")
        if self._runnable_since is not None and now - self._runnable_since > SILENCE_S:
            return Health(False, f"runnable requests have seen no plan for {now - self._runnable_since:.1f} s")
        if self._quarantined > self._max_quarantined_blocks:
            return Health(
                False, f"{self._quarantined} KV blocks are quarantined; the budget is {self._max_quarantined_blocks}"
            )
        return Health(True)

    def _limit(self, num_tokens: int) -> float:
        longest = self._longest.get(num_tokens.bit_length(), 0.0)
        return max(SILENCE_S, STEP_FACTOR * max(longest, self._seconds_per_token * num_tokens))
