"""Runs a deployment from start to drain: all members side by side, the ready line, the order of the end.

The end: the router drains first, so that no new request reaches an engine; then the engines drain together. A second
signal kills what is left. Whatever way `supervise` is left, no process of the deployment remains.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import anyio

from tools.deployment.keeper import Ask, GaveUp, Keeper
from tools.deployment.plan import Deployment

STOP_MARGIN_S = 5.0  # beyond its own drain timeout a member gets this long before SIGKILL


async def supervise(
    deployment: Deployment,
    stop: AsyncIterator[object],
    *,
    wait_ready: Ask,
    announce: Callable[[], Awaitable[None]],
    log: Callable[[bytes], object],
    clock: Callable[[], float],
    drain_timeout: float,
) -> int:
    """The exit code: 0 after `stop` gave an element. `announce` is awaited once, when every member has been ready."""
    engines = [Keeper(member, wait_ready=wait_ready, log=log, clock=clock) for member in deployment.engines]
    router = Keeper(deployment.router, wait_ready=wait_ready, log=log, clock=clock)
    keepers = [*engines, router]
    code = 0

    async with anyio.create_task_group() as tasks:
        over = anyio.Event()

        async def keep(keeper: Keeper) -> None:
            nonlocal code
            try:
                await keeper.run()
            except GaveUp as gave_up:
                code = code or gave_up.exit_code
                log(f"kvyard up: {gave_up}\n".encode())
                over.set()

        async def tell() -> None:
            for keeper in keepers:
                await keeper.ready.wait()
            await announce()

        async def first_signal() -> None:
            await anext(stop)
            log(b"kvyard up: draining; once more to kill\n")
            over.set()

        for keeper in keepers:
            tasks.start_soon(keep, keeper)
        tasks.start_soon(tell)
        tasks.start_soon(first_signal)
        await over.wait()
        await _end(engines, router, stop, drain_timeout + STOP_MARGIN_S, patient=code == 0)
        tasks.cancel_scope.cancel()
    return code


async def _end(
    engines: list[Keeper], router: Keeper, stop: AsyncIterator[object], seconds: float, *, patient: bool
) -> None:
    async with anyio.create_task_group() as tasks:

        async def second_signal() -> None:
            await anext(stop)
            tasks.cancel_scope.cancel()

        if patient:
            tasks.start_soon(second_signal)
        await router.stop(seconds)
        async with anyio.create_task_group() as draining:
            for engine in engines:
                draining.start_soon(engine.stop, seconds)
        tasks.cancel_scope.cancel()
