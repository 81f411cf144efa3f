"""Two threads around the device: one launches the steps, one waits for those that the device has not finished yet.

Plans wait in the forward thread's own queue, so a step starts the moment the one before has been launched, whatever
the event loop is doing. A step that is done when its launch returns, as always on a CPU, is handed on at once; else
the collecting thread, started for the first of them, waits for it while the next ones are launched.

Each result says how long nothing was under way before its step. Where the device does the work, a step counts as under
way until it has been collected.

Invariant: outcomes come in the order of the plans; after the first failure, or `stop`, nothing is launched any more
and nothing follows.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from actors.messages.plan import StepPlan, StepResult

P = ParamSpec("P")
T = TypeVar("T")
_PR_SET_NAME = 15  # <linux/prctl.h>


class StepUnderWay(Protocol):
    """`runner.step_in_progress.StepInProgress`, or a stand-in."""

    @property
    def done(self) -> bool: ...

    def result(self) -> StepResult: ...


class Runs(Protocol):
    """The runner's face: `runner.model_runner.ModelRunner`, or a stand-in."""

    def launch(self, plan: StepPlan) -> StepUnderWay: ...


class StepError(Exception):
    """What `error` did to step `step`."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error
        super().__init__(f"step {step}: {type(error).__name__}: {error}")


def name_thread(name: str) -> None:
    """The calling thread's name as `top -H` and /proc show it; Python's own stays inside the interpreter."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"kvyard-{name}".encode()[:15], 0, 0, 0)


class SerialThread(Executor):
    """One thread that does what is submitted, in order. A daemon: a device that hangs does not keep the process."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._work.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends behind what has been submitted."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        name_thread(self._thread.name)
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds, such as tensors, goes now and not with the next step


class Pipeline:
    def __init__(
        self,
        runner: Runs,
        forward: SerialThread,
        deliver: Callable[[StepResult | StepError], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`forward`: the thread that made the runner (torch's thread settings are its own). `deliver` is called on
        either thread, never on both at once."""
        self._runner, self._forward, self._deliver = runner, forward, deliver
        self._collecting: SerialThread | None = None
        self._over = False  # nothing is launched or delivered any more
        self._broken = False  # a launch has raised: nothing is launched any more
        # Each written by one thread only: steps that the collecting thread was given, and that it has handed on.
        self._num_given = self._num_collected = 0
        self._clock, self._idle_since = clock, clock()

    def submit(self, plan: StepPlan) -> None:
        """Never waits."""
        self._forward.submit(self._launch, plan)

    def stop(self) -> Future[None]:
        """What waits is not launched, and what is under way is not delivered. Done when both threads are idle; then
        they end."""
        self._over = True
        idle: Future[None] = Future()
        self._forward.submit(self._end, idle)
        self._forward.shutdown(wait=False)
        return idle

    def _launch(self, plan: StepPlan) -> None:
        if self._over or self._broken:
            return
        nothing_under_way = self._num_given == self._num_collected
        waited = self._clock() - self._idle_since if nothing_under_way else 0.0
        step: StepUnderWay
        try:
            step = self._runner.launch(plan)
        except BaseException as error:
            step, self._broken = _Unlaunched(error), True
        if step.done and self._num_given == self._num_collected:
            self._collect(plan.step, step, waited)
        else:
            if self._collecting is None:
                self._collecting = SerialThread("collect")
            self._num_given += 1
            self._collecting.submit(self._collect_given, plan.step, step, waited)

    def _collect_given(self, number: int, step: StepUnderWay, waited: float) -> None:
        self._collect(number, step, waited)
        self._num_collected += 1

    def _collect(self, number: int, step: StepUnderWay, waited: float) -> None:
        if self._over:
            return
        try:
            outcome: StepResult | StepError = msgspec.structs.replace(step.result(), waited_s=waited)
        except BaseException as error:
            self._over = True
            outcome = StepError(number, error)
        self._idle_since = self._clock()
        self._deliver(outcome)

    def _end(self, idle: Future[None]) -> None:
        if self._collecting is None:
            idle.set_result(None)
        else:
            self._collecting.submit(idle.set_result, None)
            self._collecting.shutdown(wait=False)


class _Unlaunched:
    """A step whose launch raised: the error takes its result's place in the order."""

    done = True

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error
