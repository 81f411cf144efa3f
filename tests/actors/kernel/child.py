"""What the tests of process.py start: `python -m tests.actors.kernel.child ROLE …`. Reports on stdout, a line each."""

from __future__ import annotations

import os
import signal
import sys

import anyio

from actors.kernel.link import Link
from actors.kernel.process import LINK_FD, die_with_parent, inherited_socket, spawn
from actors.kernel.run import run
from actors.kernel.system import ActorSystem
from tests.actors.kernel.support import Echo, Message, Said, Say

STDOUT = 1


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.actors.kernel.child", *arguments]


def report(*words: object) -> None:
    print(*words, flush=True)


async def serve_echo() -> None:
    """Until the parent closes the link."""
    async with ActorSystem() as system:
        link = Link(inherited_socket(), "parent")
        link.expose(await system.start(Echo()), Message, Said | None)
        await link.run()


async def be_level(level: int) -> None:
    """Reports its pid and starts the level below, down to level 1; then sleeps."""
    report(level, os.getpid())
    if level > 1:
        await spawn(command("level", str(level - 1)), stdout=STDOUT)
    await anyio.sleep_forever()


async def be_top_of_a_terminal() -> None:
    """Gets SIGINT; the child below must not: it still answers."""
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            child = await spawn(command("echo"), socket=True)
            assert child.socket is not None
            link = Link(child.socket, "child")
            echo = link.address("echo", Message, Said | None, 256)
            tasks.start_soon(link.run)
            await echo.ask(Say(1), 20)
            report("ready", child.pid)
            async for _ in signals:
                break
            report("answered", (await echo.ask(Say(2), 20)).number)
            tasks.cancel_scope.cancel()
        report("ended", await child.wait())


async def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report("ready")
    await anyio.sleep_forever()


def main(role: str, *arguments: str) -> None:
    die_with_parent()
    match role:
        case "echo":
            run(serve_echo)
        case "level":
            run(be_level, int(arguments[0]))
        case "terminal":
            run(be_top_of_a_terminal)
        case "stubborn":
            run(ignore_sigterm)
        case "exit":
            report(os.environ["KVYARD_TEST"], LINK_FD in os.environ, os.getsid(0) == os.getpid())
            sys.exit(int(arguments[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
