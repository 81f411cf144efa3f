"""Keeps one member of a deployment running: starts it, says when it is ready, starts it again when it ends.

Invariant: at most one process of the member exists at a time, and none after `stop` or after the keeper's task ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

import anyio

from actors.kernel.process import Child, spawn
from tools.deployment.log_relay import relay
from tools.deployment.plan import Member
from tools.deployment.restart import RestartPolicy

LAST_LOG_LINES_S = 1.0  # a grandchild may hold the pipe a little longer than the child lived
Ask = Callable[[Member], Awaitable[None]]


class GaveUp(Exception):
    """A member cannot start, and starting it again would not help."""

    def __init__(self, name: str, exit_code: int) -> None:
        self.name, self.exit_code = name, exit_code
        super().__init__(f"{name} cannot start: it ended with exit code {exit_code}, its last lines say why")


class Keeper:
    """`wait_ready(member)` returns when the member's process answers; `log` takes bytes for stderr."""

    def __init__(
        self, member: Member, *, wait_ready: Ask, log: Callable[[bytes], object], clock: Callable[[], float]
    ) -> None:
        self.member = member
        self.ready = anyio.Event()  # has been ready once
        self.epoch = 0
        self._wait_ready, self._log, self._clock = wait_ready, log, clock
        self._policy = RestartPolicy()
        self._child: Child | None = None
        self._stopping = False

    async def run(self) -> None:
        """Until stopped. Raises GaveUp."""
        while not self._stopping:
            self.epoch += 1
            code = await self._live()
            if self._stop_asked():
                return
            back_off = self._policy.ended(code, self._clock())
            if back_off is None:
                raise GaveUp(self.member.name, code)
            self._say(f"{_ending(code)}; it starts again in {back_off:g} s")
            await anyio.sleep(back_off)

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL after `seconds` or when cancelled; no process is left on return."""
        self._stopping = True
        if self._child is not None:
            await self._child.terminate(seconds)

    def _stop_asked(self) -> bool:
        return self._stopping  # may have changed during any await

    async def _live(self) -> int:
        """From its start to its end; the exit code."""
        reading, writing = os.pipe()
        try:
            child = await spawn(
                self.member.arguments(self.epoch), env=self.member.environment, stdout=writing, stderr=writing
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        async with child, anyio.create_task_group() as tasks:
            self._child = child
            logged = anyio.Event()
            tasks.start_soon(self._relay, reading, logged)
            tasks.start_soon(self._note_ready)
            code = await child.wait()
            self._child = None
            with anyio.move_on_after(LAST_LOG_LINES_S):
                await logged.wait()
            tasks.cancel_scope.cancel()
        return code

    async def _relay(self, descriptor: int, logged: anyio.Event) -> None:
        await relay(descriptor, f"[{self.member.name}] ", self._log)
        logged.set()

    async def _note_ready(self) -> None:
        await self._wait_ready(self.member)
        self._policy.ready(self._clock())
        if self.epoch > 1:
            self._say(f"ready again, epoch {self.epoch}")
        self.ready.set()

    def _say(self, text: str) -> None:
        self._log(f"[{self.member.name}] kvyard up: {text}\n".encode())


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
