"""ExecutorActor: turns plans into results, in their order, on threads of its own (forward.py).

The worker's loop stays free for transfers and pings while the thread computes. A step that raises leaves the device in
an unknown state: `StepFailed`, and the engine ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import anyio

from actors.forward import Pipeline, Runs, SerialThread, StepError
from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.kernel.wakeup import Wakeup
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.worker_settings import EXECUTOR_WINDOW


class ExecutorActor(Actor[StepPlan]):
    mailbox_size = EXECUTOR_WINDOW

    def __init__(
        self,
        runner: Runs,
        thread: SerialThread,
        results: Address[StepResult | StepFailed],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`thread`: the one that made the runner; it ends with the actor."""
        super().__init__("executor")
        self._results = results
        self._pipeline = Pipeline(runner, thread, self._from_thread, clock)
        self._outcomes: deque[StepResult | StepError] = deque()
        self._arrival = Wakeup()
        # Plans that have no result yet; beyond them the mailbox fills up and its senders wait.
        self._room = anyio.Semaphore(self.mailbox_size)

    async def started(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tasks.start_soon(self._report)

    async def receive(self, message: StepPlan, reply: Reply) -> None:
        await self._room.acquire()
        self._pipeline.submit(message)

    async def stopped(self) -> None:
        await asyncio.wrap_future(self._pipeline.stop())

    def _from_thread(self, outcome: StepResult | StepError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
            self._loop.call_soon_threadsafe(self._arrived, outcome)

    def _arrived(self, outcome: StepResult | StepError) -> None:
        self._outcomes.append(outcome)
        self._arrival.wake()

    async def _report(self) -> None:
        while True:
            if not self._outcomes:
                await self._arrival.wait()
            while self._outcomes:
                outcome = self._outcomes.popleft()
                if isinstance(outcome, StepError):
                    error = outcome.error
                    await self._results.tell(StepFailed(outcome.step, f"{type(error).__name__}: {error}"))
                    raise error
                await self._results.tell(outcome)
                self._room.release()
