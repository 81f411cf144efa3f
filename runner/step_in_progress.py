"""A step that has been handed to the device, and how its result is had.

Invariant: nothing here touches what the next launch reads, except `remember`, which the runner itself calls. So
`result` may be asked on another thread than the launches are made on.
"""

from __future__ import annotations

from actors.messages.plan import StepPlan, StepResult
from runner.device import HostCopy, Mark, seconds_between
from runner.requests import PlannedRow


class StepInProgress:
    def __init__(
        self,
        plan: StepPlan,
        sampling_rows: tuple[PlannedRow, ...],
        token_ids: HostCopy | None,
        marks: tuple[Mark, Mark, Mark] | tuple[()],
    ) -> None:
        """`token_ids` int32 [sampling rows]; None for a plan without rows. `marks`: start, computed, sampled."""
        self._plan, self._sampling_rows, self._token_ids, self._marks = plan, sampling_rows, token_ids, marks

    @property
    def done(self) -> bool:
        """Whether `result` would not have to wait. Always so on a CPU."""
        return self._token_ids is None or self._token_ids.done

    def result(self) -> StepResult:
        """Waits for the device. Raises RuntimeError when it has failed.

        `execute_s` and `sample_s` are the device's own times. On a CPU that is the launch as the host saw it, the
        making of the batch included; on a GPU the time between two events, from the first kernel that finds the one
        before finished.
        """
        if self._token_ids is None:
            return StepResult(step=self._plan.step, num_sampled=b"", sampled_token_ids=b"")
        token_ids = self._token_ids.values().tobytes()
        execute_s = sample_s = 0.0
        if self._marks:
            started, computed, sampled = self._marks
            execute_s, sample_s = seconds_between(started, computed), seconds_between(computed, sampled)
        return StepResult(self._plan.step, self._plan.num_sampled, token_ids, execute_s, sample_s)

    def remember(self) -> None:
        """After `done`: the requests learn the values of their tokens, which a rollback would compute again."""
        assert self._token_ids is not None
        for row, token_id in zip(self._sampling_rows, self._token_ids.values().tolist(), strict=True):
            row.state.arrived(row.end, token_id)
