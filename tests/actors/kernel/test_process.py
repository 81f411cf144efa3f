from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from actors.kernel.link import Link
from actors.kernel.process import LINK_FD, PARENT_PID, inherited_socket, spawn
from actors.messages.errors import ActorGone, ConfigurationError
from tests.actors.kernel.child import command
from tests.actors.kernel.support import Message, Said, Say, within

ROOT = Path(__file__).parents[3]


class Lines:
    """The lines that the processes write which got `fd` as their stdout."""

    def __init__(self, read_fd: int, fd: int) -> None:
        self.fd = fd
        self._read_fd = read_fd
        self._data = b""

    async def next(self) -> list[str]:
        while b"\n" not in self._data:
            await anyio.wait_readable(self._read_fd)
            data = os.read(self._read_fd, 4096)
            if not data:
                raise EOFError
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line.decode().split()


@asynccontextmanager
async def lines() -> AsyncIterator[Lines]:
    read_fd, write_fd = os.pipe()
    try:
        yield Lines(read_fd, write_fd)
    finally:
        os.close(read_fd)
        os.close(write_fd)


async def ended(pid: int) -> None:
    """Until a process that need not be our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@within(30)
async def test_exit_code_environment_session_and_several_waiters() -> None:
    async with lines() as output:
        child = await spawn(command("exit", "7"), env={"KVYARD_TEST": "value"}, stdout=output.fd)
        codes: list[int] = []

        async def wait() -> None:
            codes.append(await child.wait())

        async with anyio.create_task_group() as waiters:
            waiters.start_soon(wait)
            waiters.start_soon(wait)
        assert codes == [7, 7]
        assert child.returncode == 7
        # The variable is there, no link was asked for, and the child leads a session of its own.
        assert await output.next() == ["value", "False", "True"]
        assert await child.terminate(5) == 7  # of one that has ended: nothing more happens


@within(30)
async def test_ask_a_child_over_its_link_until_it_is_killed() -> None:
    async with anyio.create_task_group() as tasks:
        child = await spawn(command("echo"), socket=True)
        assert child.socket is not None
        link = Link(child.socket, "worker 0")
        echo = link.address("echo", Message, Said | None, 256)
        tasks.start_soon(link.run)
        assert await echo.ask(Say(3, b"kv"), 20) == Said(3, b"kv")

        async def ask_for_ever() -> None:
            while True:
                await echo.ask(Say(4), 3600)

        async def until_gone() -> None:
            with pytest.raises(ActorGone, match=r"actor 'echo' is gone: .*worker 0"):
                await ask_for_ever()

        tasks.start_soon(until_gone)
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL


@within(30)
async def test_a_child_ends_on_its_own_when_the_link_is_closed() -> None:
    child = await spawn(command("echo"), socket=True)
    assert child.socket is not None
    child.socket.close()
    assert await child.wait() == 0


@within(30)
async def test_terminate_asks_first_and_then_kills() -> None:
    async with lines() as output:
        async with await spawn(["sleep", "60"]) as obedient:
            pass
        assert obedient.returncode == -signal.SIGTERM

        stubborn = await spawn(command("stubborn"), stdout=output.fd)
        assert await output.next() == ["ready"]
        before = anyio.current_time()
        assert await stubborn.terminate(0.1) == -signal.SIGKILL
        assert anyio.current_time() - before >= 0.09

        cancelled = await spawn(command("stubborn"), stdout=output.fd)
        assert await output.next() == ["ready"]
        with anyio.move_on_after(0.05):
            await cancelled.terminate(3600)
        assert cancelled.returncode == -signal.SIGKILL


@pytest.mark.parametrize("killed", [3, 2])
@within(60)
async def test_killing_one_level_kills_all_below(killed: int) -> None:
    """Three levels of processes; SIGKILL to the top one takes 2 and 1, to the middle one takes 1 and spares 3."""
    async with lines() as output:
        top = await spawn(command("level", "3"), stdout=output.fd)
        pids: dict[int, int] = {}
        while len(pids) < 3:
            level, pid = map(int, await output.next())
            pids[level] = pid
        assert pids[3] == top.pid
        descriptors = {level: os.pidfd_open(pid) for level, pid in pids.items()}
        os.kill(pids[killed], signal.SIGKILL)
        for level in range(1, killed + 1):
            await anyio.wait_readable(descriptors[level])
        for descriptor in descriptors.values():
            os.close(descriptor)
        # Level 3 had been killed, or was alive and well until asked to end.
        assert await top.terminate(5) == -(signal.SIGKILL if killed == 3 else signal.SIGTERM)


@within(30)
async def test_a_child_whose_parent_was_gone_before_it_could_ask_ends() -> None:
    """Its environment names a parent that is not its parent, as after a re-parenting."""
    environment = {**os.environ, PARENT_PID: "1", "KVYARD_TEST": "late"}
    result = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command("exit", "0"), env=environment, cwd=ROOT, capture_output=True, check=False)
    )
    assert (result.returncode, result.stdout) == (70, b"")


@within(60)
async def test_ctrl_c_reaches_only_the_top_process() -> None:
    """SIGINT to a whole process group, as a terminal sends it: the top answers it, its child still answers asks."""
    async with lines() as output:
        top = await spawn(command("terminal"), stdout=output.fd)  # leads a group of its own, like a shell's job
        word, pid = await output.next()
        assert word == "ready"
        os.killpg(top.pid, signal.SIGINT)
        assert await output.next() == ["answered", "2"]
        assert await output.next() == ["ended", "0"]
        assert await top.wait() == 0
        await ended(int(pid))


@within(30)
async def test_no_descriptor_is_left_behind() -> None:
    """Waited for or killed, with a socket or without, started or not: as many open files afterwards as before."""

    async def once() -> None:
        for with_socket in (False, True):
            child = await spawn(["sleep", "60"], socket=with_socket)
            await child.terminate(5)
            if child.socket is not None:
                child.socket.close()
        async with anyio.create_task_group() as tasks:
            child = await spawn(["sleep", "60"], socket=True)
            assert child.socket is not None
            tasks.start_soon(Link(child.socket, "sleep").run)
            await child.terminate(5)
        with pytest.raises(FileNotFoundError):
            await spawn(["/no/such/program"], socket=True)

    await once()  # whatever is opened once and for all
    before = open_descriptors()
    for _ in range(3):
        await once()
    assert open_descriptors() == before


@within(30)
async def test_only_the_main_thread_may_spawn() -> None:
    def elsewhere() -> None:
        anyio.run(spawn, ["true"])

    with pytest.raises(RuntimeError, match="outside the main thread"):
        await anyio.to_thread.run_sync(elsewhere)


def test_a_process_started_by_hand_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_FD, raising=False)
    with pytest.raises(ConfigurationError, match="must be started by its engine"):
        inherited_socket()


def test_the_inherited_socket_can_be_taken_once_and_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    monkeypatch.setenv(LINK_FD, str(theirs.detach()))
    with ours, inherited_socket() as link:
        assert not link.get_inheritable()
        assert not link.getblocking()
        assert LINK_FD not in os.environ
        ours.sendall(b"x")
        assert link.recv(1) == b"x"
