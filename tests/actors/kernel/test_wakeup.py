from __future__ import annotations

import anyio
import pytest

from actors.kernel.wakeup import Wakeup


async def test_wakes_the_one_that_waits_each_time_anew() -> None:
    wakeup, woken = Wakeup(), []

    async def waiter() -> None:
        for number in range(2):
            await wakeup.wait()
            woken.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter)
        for expected in ([0], [0, 1]):
            await anyio.wait_all_tasks_blocked()
            wakeup.wake()
            wakeup.wake()  # the second in one turn of the loop is the same
            await anyio.wait_all_tasks_blocked()
            assert woken == expected


async def test_a_wake_before_the_wait_is_not_remembered_and_a_cancelled_wait_leaves_nothing() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    for _ in range(2):
        with anyio.move_on_after(0.01) as scope:
            await wakeup.wait()
        assert scope.cancelled_caught
    wakeup.wake()


async def test_a_second_waiter_is_a_mistake() -> None:
    wakeup = Wakeup()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wakeup.wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(AssertionError):
            await wakeup.wait()
        wakeup.wake()
