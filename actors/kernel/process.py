"""Starting a child process that cannot outlive its parent, and the socket between the two.

Invariant: when a process dies, even by SIGKILL, every process below it dies. The kernel's parent-death signal does
that; it fires when the *thread* that started the child ends, so only the main thread may start one. A child gets a
session of its own: Ctrl-C in a terminal reaches the top process alone, which then stops its children in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket as sockets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

import anyio

from actors.messages.errors import ConfigurationError

PARENT_PID = "KVYARD_PARENT_PID"
LINK_FD = "KVYARD_LINK_FD"
ORPHANED = 70  # exit code of a child whose parent was gone before it could ask for the signal
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_STDERR = 2


def die_with_parent() -> None:
    """The first thing that a child does. Does nothing in a process that `spawn` did not start: the top of a tree."""
    parent = os.environ.pop(PARENT_PID, None)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        os._exit(ORPHANED)


def inherited_socket() -> sockets.socket:
    """In a child that was started with `socket=True`: its end, for a Link. Can be taken once."""
    descriptor = os.environ.pop(LINK_FD, None)
    if descriptor is None:
        raise ConfigurationError(f"{LINK_FD} is not set: this process must be started by its engine, not by hand")
    link = sockets.socket(fileno=int(descriptor))
    link.set_inheritable(False)
    link.setblocking(False)
    return link


class Child:
    """A running child. As a context manager it is terminated when the block is left."""

    def __init__(self, process: subprocess.Popen[bytes], socket: sockets.socket | None) -> None:
        self.pid = process.pid
        self.socket = socket  # our end; whoever takes it (a Link) closes it
        self._process = process
        self._exit: int | None = os.pidfd_open(process.pid)  # readable once the child has ended
        self._waiting = anyio.Lock()

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that killed it. None: it runs, or nobody has waited for it yet."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until it has ended; any number of tasks may wait."""
        async with self._waiting:
            if self._exit is not None:
                await anyio.wait_readable(self._exit)
                self._process.wait()
                os.close(self._exit)
                self._exit = None
        return self._process.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """A child that has ended already is fine."""
        self._process.send_signal(number)

    async def terminate(self, seconds: float) -> int:
        """SIGTERM; after `seconds`, or when cancelled meanwhile, SIGKILL. Returns when the child has ended."""
        self.send_signal(signal.SIGTERM)
        try:
            with anyio.move_on_after(seconds):
                return await self.wait()
        finally:
            with anyio.CancelScope(shield=True):
                self.send_signal(signal.SIGKILL)
                await self.wait()
        return self._process.returncode

    async def __aenter__(self) -> Child:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.terminate(5.0)


async def spawn(
    argv: Sequence[str],
    *,
    socket: bool = False,
    env: Mapping[str, str] | None = None,
    stdout: int = _STDERR,
    stderr: int = _STDERR,
) -> Child:
    """Starts `argv` as a new program (never a fork). `env` is added to this process's own environment.

    The child's stdout goes to our stderr unless a descriptor is given: stdout belongs to the top process. Raises
    OSError when the program cannot be started, RuntimeError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("spawn outside the main thread: the child would die with this thread")
    environment = {**os.environ, **(env or {}), PARENT_PID: str(os.getpid())}
    environment.pop(LINK_FD, None)
    if not socket:
        return Child(_start(argv, environment, stdout, stderr, ()), None)
    ours, theirs = sockets.socketpair()
    try:
        environment[LINK_FD] = str(theirs.fileno())
        process = _start(argv, environment, stdout, stderr, (theirs.fileno(),))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return Child(process, ours)


def _start(
    argv: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=descriptors,
        start_new_session=True,
    )
