"""The engine process's side of its worker: starts it, waits until it is ready, notices its end.

KV bytes and tensors stay in the worker; plans, results, orders and reports cross the socket.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.link import Link
from actors.kernel.process import Child, spawn
from actors.kernel.remote import RemoteAddress
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.messages.supervision import WorkerReady
from actors.messages.transfer import TransferOrder, TransferReport
from actors.scheduler import SchedulerMessage
from actors.worker_settings import EXECUTOR_WINDOW, EXIT_CONFIGURATION, TRANSFER_WINDOW, WorkerSettings

STOP_SECONDS = 5.0


class StartupActor(Actor[WorkerReady]):
    """Hears once that the worker is ready."""

    mailbox_size = 1

    def __init__(self) -> None:
        super().__init__("startup")
        self.ready = anyio.Event()
        self.message: WorkerReady | None = None

    async def receive(self, message: WorkerReady, reply: Reply) -> None:
        self.message = message
        self.ready.set()


class WorkerProcess:
    """`executor` and `transfer` are the addresses of the worker's actors, usable at once."""

    def __init__(self, child: Child, link: Link, startup: StartupActor) -> None:
        self.child, self._link, self._startup = child, link, startup
        self.executor: RemoteAddress[StepPlan] = link.address("executor", StepPlan, type(None), EXECUTOR_WINDOW)
        self.transfer: RemoteAddress[TransferOrder] = link.address(
            "transfer", TransferOrder, type(None), TRANSFER_WINDOW
        )

    @property
    def pid(self) -> int:
        return self.child.pid

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        system: ActorSystem,
        tasks: TaskGroup,
        scheduler: Address[SchedulerMessage],
        environment: Mapping[str, str],
    ) -> WorkerProcess:
        startup = StartupActor()
        await system.start(startup)
        argv = [sys.executable, "-P", "-m", "actors.worker", msgspec.json.encode(settings).decode()]
        child = await spawn(argv, socket=True, env=environment)
        assert child.socket is not None
        link = Link(child.socket, "the worker")
        link.expose(scheduler, StepResult | StepFailed | TransferReport, type(None))
        link.expose(startup.address, WorkerReady, type(None))
        tasks.start_soon(link.run)
        return cls(child, link, startup)

    async def ready(self) -> WorkerReady:
        """Waits for the weights. Raises ConfigurationError when the worker ends instead; it has said why on stderr."""
        async with anyio.create_task_group() as tasks:

            async def until_exit() -> None:
                code = await self.child.wait()
                what = "cannot start with this model or these flags" if code == EXIT_CONFIGURATION else "died at start"
                raise ConfigurationError(f"the worker process {what} (exit code {code}); see the line above")

            tasks.start_soon(until_exit)
            await self._startup.ready.wait()
            tasks.cancel_scope.cancel()
        assert self._startup.message is not None
        return self._startup.message

    async def stop(self) -> None:
        await self.child.terminate(STOP_SECONDS)
