"""ExecutorActor: turns plans into results, in their order, on one thread of its own.

The worker's loop stays free for transfers and pings while the thread computes. A forward pass that raises leaves the
device in an unknown state: `StepFailed`, and the engine ends.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Protocol

import anyio

from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.worker_settings import EXECUTOR_WINDOW


class Runs(Protocol):
    """The runner's face: `runner.model_runner.ModelRunner`, or a stand-in."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class ExecutorActor(Actor[StepPlan]):
    mailbox_size = EXECUTOR_WINDOW

    def __init__(self, runner: Runs, thread: Executor, results: Address[StepResult | StepFailed]) -> None:
        """`thread`: an executor of one thread, the one that made the runner (torch's thread settings are its own)."""
        super().__init__("executor")
        self._runner, self._thread, self._results = runner, thread, results

    async def started(self) -> None:
        self._plans_in, self._plans_out = anyio.create_memory_object_stream[StepPlan](self.mailbox_size)
        self.tasks.start_soon(self._execute)

    async def receive(self, message: StepPlan, reply: Reply) -> None:
        await self._plans_in.send(message)

    async def _execute(self) -> None:
        loop = asyncio.get_running_loop()
        async for plan in self._plans_out:
            try:
                result = await loop.run_in_executor(self._thread, self._runner.execute, plan)
            except Exception as error:
                await self._results.tell(StepFailed(plan.step, f"{type(error).__name__}: {error}"))
                raise
            await self._results.tell(result)
