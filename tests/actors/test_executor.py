"""ExecutorActor: the order of steps and results, its threads, and what a failure does. The runner is a stand-in.

Every step waits for a gate that the test opens, so nothing depends on who is faster.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from actors.executor import ExecutorActor
from actors.forward import SerialThread
from actors.kernel.actor import Actor
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.errors import MailboxFull
from actors.messages.plan import StepFailed, StepPlan, StepResult

SECONDS = 20.0


class Gate:
    """Closed until `open`; whoever comes too late for the test's patience goes on, and the test fails elsewhere."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self.reached.set()
        self._opened.wait(SECONDS)


class Step:
    def __init__(self, runner: Runner, number: int) -> None:
        self._runner, self._number = runner, number
        self.done = not runner.asynchronous

    def result(self) -> StepResult:
        self._runner.log(f"collect {self._number}")
        if not self.done:
            self._runner.collected[self._number].pass_through()
        if self._number in self._runner.failing_results:
            raise RuntimeError(f"no result of {self._number}")
        return StepResult(self._number, b"", b"")


class Runner:
    """`asynchronous`: a step is launched at once and collected when its gate opens; else the launch has the gate."""

    def __init__(self, *, asynchronous: bool = False, gated: bool = True) -> None:
        self.asynchronous = asynchronous
        self.launched = [Gate() for _ in range(40)]
        self.collected = [Gate() for _ in range(40)]
        self.failing_launches: set[int] = set()
        self.failing_results: set[int] = set()
        self.events: list[tuple[str, threading.Thread]] = []
        if asynchronous or not gated:
            for gate in self.launched:
                gate.open()

    def log(self, what: str) -> None:
        self.events.append((what, threading.current_thread()))

    @property
    def names(self) -> list[str]:
        return [what for what, _ in self.events]

    def launch(self, plan: StepPlan) -> Step:
        self.log(f"launch {plan.step}")
        self.launched[plan.step].pass_through()
        if plan.step in self.failing_launches:
            raise ValueError(f"cannot launch {plan.step}")
        return Step(self, plan.step)


class Results(Actor[StepResult | StepFailed]):
    def __init__(self) -> None:
        super().__init__("results")
        self.all: list[StepResult | StepFailed] = []
        self._news = anyio.Event()

    async def receive(self, message: StepResult | StepFailed, reply: Reply) -> None:
        self.all.append(message)
        self._news.set()
        self._news = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(SECONDS):
            while not condition():
                await self._news.wait()

    @property
    def steps(self) -> list[int]:
        return [message.step for message in self.all]


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), b"", b"", b"", b"", b"")


async def reached(gate: Gate) -> None:
    assert await anyio.to_thread.run_sync(gate.reached.wait, SECONDS)


def gone(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


class Executor(ExecutorActor):
    """Says when it has begun to stop."""

    async def stopped(self) -> None:
        self.stopping.set()
        await super().stopped()

    async def started(self) -> None:
        self.stopping = anyio.Event()
        await super().started()


class House:
    """A system with an ExecutorActor in it. When it is left every thread has to be gone."""

    def __init__(self, runner: Runner, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock
        self.runner, self.thread = runner, SerialThread("forward")
        self.system, self.results = ActorSystem(), Results()

    async def __aenter__(self) -> House:
        await self.system.__aenter__()
        await self.system.start(self.results)
        self.actor = Executor(self.runner, self.thread, self.results.address, self.clock)
        self.executor = await self.system.start(self.actor)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.system.__aexit__(None, None, None)
        assert all(gone(thread) for thread in {thread for _, thread in self.runner.events})
        self.thread.shutdown()
        assert not self.thread.is_alive


async def test_results_come_in_order_and_the_loop_stays_free() -> None:
    """The loop runs while step 0 is held: it is what opens the gates."""
    async with House(Runner()) as house:
        for step in range(30):
            await house.executor.tell(plan(step))
        for step in range(30):
            await reached(house.runner.launched[step])
            assert house.results.steps == list(range(step))[: len(house.results.steps)]
            house.runner.launched[step].open()
        await house.results.until(lambda: len(house.results.all) == 30)
        assert house.results.all == [StepResult(step, b"", b"") for step in range(30)]
    assert house.system.failure is None


async def test_a_device_that_is_done_costs_no_second_thread() -> None:
    async with House(Runner(gated=False)) as house:
        for step in range(3):
            await house.executor.tell(plan(step))
        await house.results.until(lambda: len(house.results.all) == 3)
    assert house.runner.names == [f"{what} {step}" for step in range(3) for what in ("launch", "collect")]
    assert len({thread for _, thread in house.runner.events}) == 1


async def test_a_result_says_how_long_nothing_was_under_way_before_its_step() -> None:
    """The clock goes on by a second whenever it is looked at: when a step begins and when it is over."""
    async with House(Runner(gated=False), clock=count(0.0).__next__) as house:
        for step in range(2):
            await house.executor.tell(plan(step))
        await house.results.until(lambda: len(house.results.all) == 2)
    assert [result.waited_s for result in house.results.all if isinstance(result, StepResult)] == [1.0, 1.0]


async def test_a_step_launched_behind_one_that_the_device_still_computes_has_not_waited() -> None:
    async with House(Runner(asynchronous=True), clock=count(0.0).__next__) as house:
        for step in range(2):
            await house.executor.tell(plan(step))
        await reached(house.runner.launched[1])
        for step in range(2):
            house.runner.collected[step].open()
        await house.results.until(lambda: len(house.results.all) == 2)
    assert [result.waited_s for result in house.results.all if isinstance(result, StepResult)] == [1.0, 0.0]


async def test_a_waiting_plan_starts_without_the_event_loop() -> None:
    """The loop is held from before step 0 ends until step 1 has begun."""
    async with House(Runner()) as house:
        for step in range(2):
            await house.executor.tell(plan(step))
        await reached(house.runner.launched[0])
        house.runner.launched[0].open()
        assert house.runner.launched[1].reached.wait(SECONDS)  # blocks the loop on purpose
        assert house.results.all == []
        house.runner.launched[1].open()
        await house.results.until(lambda: house.results.steps == [0, 1])


async def test_steps_are_launched_before_the_results_of_earlier_ones() -> None:
    """Step 2's copy has arrived before step 0's: the results come in order all the same."""
    async with House(Runner(asynchronous=True)) as house:
        for step in range(3):
            await house.executor.tell(plan(step))
        await reached(house.runner.launched[2])
        await reached(house.runner.collected[0])
        assert house.results.all == []
        for step in (2, 1, 0):
            house.runner.collected[step].open()
        await house.results.until(lambda: len(house.results.all) == 3)
        assert house.results.steps == [0, 1, 2]
        house.runner.asynchronous = False
        await house.executor.tell(plan(3))
        await house.results.until(lambda: house.results.steps == [0, 1, 2, 3])
    threads = dict(house.runner.events)
    assert threads["launch 0"] is threads["launch 2"]
    assert threads["collect 0"] is threads["collect 2"] is not threads["launch 0"]
    # Nothing is outstanding any more: a step that is done is handed on where it was launched.
    assert threads["collect 3"] is threads["launch 0"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_launch_that_raises_ends_the_actor_behind_the_results_before_it(asynchronous: bool) -> None:
    runner = Runner(asynchronous=asynchronous, gated=False)
    runner.failing_launches.add(1)
    async with House(runner) as house:
        for step in range(4):
            await house.executor.tell(plan(step))
        await reached(runner.launched[1])
        runner.collected[0].open()
        await house.results.until(lambda: len(house.results.all) == 2)
        with anyio.fail_after(SECONDS):
            await house.system.wait_failed()
    assert house.results.all == [StepResult(0, b"", b""), StepFailed(1, "ValueError: cannot launch 1")]
    assert str(house.system.failure) == "cannot launch 1"
    assert "launch 2" not in runner.names


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_result_that_raises_ends_the_actor(asynchronous: bool) -> None:
    """Of the steps that are launched already nothing is reported any more."""
    runner = Runner(asynchronous=asynchronous, gated=False)
    runner.failing_results.add(1)
    async with House(runner) as house:
        for step in range(3):
            await house.executor.tell(plan(step))
        if asynchronous:
            await reached(runner.launched[2])
        for gate in runner.collected:
            gate.open()
        with anyio.fail_after(SECONDS):
            await house.system.wait_failed()
        assert ("launch 2" in runner.names) == asynchronous
    assert house.results.all == [StepResult(0, b"", b""), StepFailed(1, "RuntimeError: no result of 1")]
    assert str(house.system.failure) == "no result of 1"
    assert "collect 2" not in runner.names


async def test_a_stop_waits_for_the_step_under_way_and_drops_those_behind_it() -> None:
    async with House(Runner()) as house:
        for step in range(3):
            await house.executor.tell(plan(step))
        await reached(house.runner.launched[0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.system.stop, house.executor, SECONDS)
            await house.actor.stopping.wait()
            for gate in house.runner.launched:
                gate.open()
    assert house.runner.names == ["launch 0"]
    assert house.results.all == []
    assert house.system.failure is None


async def test_the_sender_waits_when_nothing_is_computed() -> None:
    """16 plans are taken, one is about to be, 16 wait in the mailbox; the next finds no room."""
    async with House(Runner()) as house:
        for step in range(33):
            house.executor.tell_nowait(plan(step))
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
        with pytest.raises(MailboxFull):
            house.executor.tell_nowait(plan(33))
        for gate in house.runner.launched:
            gate.open()
        await house.results.until(lambda: len(house.results.all) == 33)
    assert house.results.steps == list(range(33))


HANGS = """
import anyio, threading
from actors.executor import ExecutorActor
from actors.forward import SerialThread
from actors.kernel.actor import Actor
from actors.kernel.run import run
from actors.kernel.system import ActorSystem
from actors.messages.plan import StepPlan

class Hangs:
    started = threading.Event()
    def launch(self, plan):
        self.started.set()
        threading.Event().wait()

class Impatient(ExecutorActor):
    stop_seconds = 0.2

class Results(Actor):
    pass

async def main():
    async with ActorSystem() as system:
        results = await system.start(Results("results"))
        executor = await system.start(Impatient(Hangs(), SerialThread("forward"), results))
        for step in range(2):
            await executor.tell(StepPlan(step, (), b"", b"", b"", b"", b""))
        await anyio.to_thread.run_sync(Hangs.started.wait)
    print("left")

run(main)
"""


def test_a_step_that_hangs_for_ever_does_not_keep_the_process() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=root, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr
    assert "actor_clean_up_timed_out actor=executor" in ended.stderr
