"""Owns all actors of a process: starts them, watches them, stops them in reverse order.

Invariant: when `async with ActorSystem()` is left, every actor has ended and its `stopped` has run, within
`stop_seconds` and the actors' own `stop_seconds`. An actor that fails takes no other with it: the owner waits for
`wait_failed` and decides (an engine exits with code 70).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from actors.kernel.actor import Actor
from actors.kernel.address import Address, LocalAddress, Watched
from actors.kernel.life import Life
from actors.messages.errors import ActorGone, KvyardError

logger = logging.getLogger(__name__)
M = TypeVar("M")


class ActorSystem:
    def __init__(
        self,
        *,
        clock: Callable[[], float] = anyio.current_time,
        ping_interval: float = 1.0,
        stop_seconds: float = 10.0,
    ) -> None:
        """Times in seconds. Leaving gives all actors together `stop_seconds` to handle what they have."""
        self.failure: BaseException | None = None  # of the first actor that raised
        self._clock = clock
        self._ping_interval = ping_interval
        self._stop_seconds = stop_seconds
        self._lives: dict[str, Life] = {}  # in order of start
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._leaving: set[str] = set()  # being stopped
        self._stopping = False
        self._failed = anyio.Event()
        self._tasks: TaskGroup

    async def __aenter__(self) -> ActorSystem:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._ping_all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping = True
        deadline = anyio.current_time() + self._stop_seconds
        with anyio.CancelScope(shield=True):
            for life in reversed(list(self._lives.values())):
                await self._stop(life, max(0.0, deadline - anyio.current_time()))
        self._tasks.cancel_scope.cancel()
        # What the body raised is not handed to the task group: it would come out wrapped in an ExceptionGroup.
        await self._tasks.__aexit__(None, None, None)

    async def start(self, actor: Actor[M]) -> LocalAddress[M]:
        """Returns when `actor.started` has; raises what it raised. Names are unique among the living."""
        if actor.name in self._lives:
            raise ValueError(f"an actor named {actor.name!r} is running already")
        life = self._lives[actor.name] = Life(actor, self._is_echo_of_a_stop)
        self._tasks.start_soon(self._run, life)
        try:
            await life.began.wait()
        except BaseException:
            life.scope.cancel()
            with anyio.CancelScope(shield=True):
                await life.ended.wait()
            raise
        if life.error is not None:
            raise life.error
        if not life.ended.is_set():
            self.watch(actor.address)
        return actor.address

    async def stop(self, address: Address[Any], seconds: float) -> None:
        """Closes the mailbox, lets the actor handle what is in it, then ends it; after `seconds` cancels it.

        An actor that has ended already is fine. An actor must not stop itself.
        """
        life = self._lives.get(address.name)
        if life is not None and life.actor.address is address:
            await self._stop(life, seconds)

    async def wait_failed(self) -> None:
        """Until the first actor has raised; `failure` says what."""
        await self._failed.wait()

    def watch(self, address: Watched) -> None:
        """Pings an actor of another process too (an address of a link). Raises ValueError for a name known already."""
        if address.name in self._heartbeats:
            raise ValueError(f"{address.name!r} is watched already")
        self._heartbeats[address.name] = _Heartbeat(address, self._clock)

    def health(self) -> dict[str, float]:
        """Name of each running or watched actor → seconds since it last answered a ping."""
        now = self._clock()
        return {name: now - heartbeat.last_answer for name, heartbeat in self._heartbeats.items()}

    async def _run(self, life: Life) -> None:
        name = life.actor.name
        try:
            await life.run()
        finally:
            del self._lives[name]
            self._heartbeats.pop(name, None)
            self._leaving.discard(name)
        if life.error is not None and self.failure is None:
            self.failure = life.error
            self._failed.set()

    async def _stop(self, life: Life, seconds: float) -> None:
        self._leaving.add(life.actor.name)
        life.actor.mailbox.close("it is stopping")
        with anyio.move_on_after(seconds):
            await life.ended.wait()
        if not life.ended.is_set():
            logger.warning("actor_stop_deadline_passed actor=%s seconds=%g", life.actor.name, seconds)
            life.scope.cancel()
            await life.ended.wait()

    def _is_echo_of_a_stop(self, life: Life, error: BaseException) -> bool:
        return isinstance(error, ActorGone) and (self._stopping or life.actor.name in self._leaving)

    async def _ping_all(self) -> None:
        while True:
            await anyio.sleep(self._ping_interval)
            for heartbeat in self._heartbeats.values():
                heartbeat.ask()


class _Heartbeat:
    """At most one ping of an actor is on its way: a busy actor does not find a heap of them."""

    def __init__(self, address: Watched, clock: Callable[[], float]) -> None:
        self.last_answer = clock()
        self._address = address
        self._clock = clock
        self._asked = False

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._address.ping(self)

    def end(self, value: object, error: KvyardError | None) -> None:
        self._asked = False
        if error is None:
            self.last_answer = self._clock()
