"""READs over UCX by NIXL: one-sided, so the owner's code takes no part.

All NIXL calls run on one thread, never on the loop: they may copy for many milliseconds. A READ cannot be cancelled:
after `stop` no further piece is posted, but the one in flight lands when it lands, so the reading is quiet only when
its handle is done or has failed. The thread sleeps on its queue while nothing is in flight.

    loop ──► nixl thread: post a piece, poll it, post the next … ── call_soon_threadsafe ─► ReadState.end
                 └─ each piece ──► verifying thread: `landed`  … ── call_soon_threadsafe ─► ReadState.rest
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
from anyio.abc import TaskGroup

from connectors.memory import KVMemory
from connectors.transports.face import Landed, PeerKey, ReadOrder, ReadState, TransportUnavailable
from connectors.transports.nixl_agent import make_agent

PIECE_BYTES = 6 << 20  # verified while the next is in flight; over 16 MiB a call would block the thread for too long
_SPIN_S = 0.002  # a READ this young is polled without a nap worth the name
_STOP_S = 1.0

Descriptors = npt.NDArray[np.uint64]  # rows of (address, length, device 0)


class NixlReading(ReadState):
    def __init__(self) -> None:
        super().__init__(cancellable=False)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


class _Remote:
    """A peer's agent as ours knows it. A doomed one is removed when its last READ is quiet."""

    def __init__(self, name: str, peer: PeerKey) -> None:
        self.name, self.peer = name, peer
        self.active = 0
        self.doomed = False


class _Transfer:
    def __init__(
        self, order: ReadOrder, landed: Landed, reading: NixlReading, remote: _Remote, memory: KVMemory
    ) -> None:
        self.landed, self.reading, self.remote = landed, reading, remote
        self.local, self.remote_rows = _descriptors(order, memory.address, memory.block_bytes)
        self.mergeable = bool(np.logical_and(np.diff(order.targets) == 1, np.diff(order.sources) == 1).any())
        self.size = order.targets.size
        self.piece = (0, 0)  # [first, last) positions: in flight, or the last one that landed
        self.handle: Any = None
        self.posted_at = 0.0


class NixlTransport:
    name = "nixl"

    def __init__(self, agent_name: str) -> None:
        self._agent_name = agent_name
        self.agent_metadata = b""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._verifications: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the end
        self._active: list[_Transfer] = []
        self._remotes: dict[bytes, _Remote] = {}  # by metadata
        self._running = False

    # ------------------------------------------------------------------ on the loop

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        self._memory, self._loop = memory, asyncio.get_running_loop()
        self._running = True
        threading.Thread(target=self._main, name="nixl", daemon=True).start()
        threading.Thread(target=self._verify, name="nixl-verify", daemon=True).start()
        try:
            await self._on_thread(self._open)
        except Exception as error:
            self._running = False
            self._jobs.put(lambda: None)
            raise TransportUnavailable(f"nixl: {error}") from error

    def read(self, order: ReadOrder, landed: Landed) -> NixlReading:
        reading = NixlReading()
        self._jobs.put(lambda: self._begin(order, landed, reading))
        return reading

    def forget(self, peer: PeerKey) -> None:
        self._jobs.put(lambda: self._doom(peer))

    async def stop(self) -> None:
        """Bounded: a READ that is still in flight is left to the end of the process."""
        if self._running:
            with anyio.move_on_after(_STOP_S, shield=True):
                await self._on_thread(self._close)

    async def _on_thread(self, call: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def job() -> None:
            try:
                call()
            except Exception as error:
                self._to_loop(partial(settle, error))
            else:
                self._to_loop(partial(settle, None))

        self._jobs.put(job)
        await done

    # ------------------------------------------------------------------ on the thread

    def _main(self) -> None:
        while self._running or self._active:
            with contextlib.suppress(queue.Empty):
                self._next_job()()
            for transfer in list(self._active):
                self._advance(transfer)
        self._verifications.put(None)

    def _verify(self) -> None:
        while (verification := self._verifications.get()) is not None:
            with contextlib.suppress(Exception):  # what is not verified does not land: the load counts
                verification()

    def _next_job(self) -> Callable[[], None]:
        """Raises queue.Empty when it is time to look after the transfers."""
        if not self._active:
            return self._jobs.get()
        if any(transfer.handle is None for transfer in self._active):
            return self._jobs.get_nowait()
        age = time.monotonic() - max(transfer.posted_at for transfer in self._active)
        return self._jobs.get(timeout=0.00002 if age < _SPIN_S else min(age / 16, 0.005))

    def _open(self) -> None:
        self._agent, _ = make_agent(self._agent_name)
        region = (self._memory.address, self._memory.num_bytes, 0, "kv")
        self._registration = self._agent.register_memory([region], "DRAM")
        self.agent_metadata = self._agent.get_agent_metadata()

    def _close(self) -> None:
        self._running = False
        for transfer in self._active:
            transfer.reading.stop()
        until = time.monotonic() + _STOP_S / 2
        while self._active and time.monotonic() < until:
            for transfer in list(self._active):
                self._advance(transfer)
            time.sleep(0.001)
        if self._active:
            return
        for remote in self._remotes.values():
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(remote.name)
        self._agent.deregister_memory(self._registration)
        del self._agent

    def _begin(self, order: ReadOrder, landed: Landed, reading: NixlReading) -> None:
        try:
            transfer = _Transfer(order, landed, reading, self._remote_of(order), self._memory)
        except Exception as error:
            self._to_loop(partial(reading.end, f"add_remote_agent: {error}"))
            return
        transfer.remote.active += 1
        self._active.append(transfer)
        if reading.stopped:
            self._end(transfer, "stopped")
            self._to_loop(reading.rest)

    def _remote_of(self, order: ReadOrder) -> _Remote:
        metadata = order.opened.agent_metadata
        remote = self._remotes.get(metadata)
        if remote is None:
            name = self._agent.add_remote_agent(metadata)
            remote = _Remote(name.decode() if isinstance(name, bytes) else name, PeerKey.of(order.ticket))
            self._remotes[metadata] = remote
        remote.doomed = False
        return remote

    def _advance(self, transfer: _Transfer) -> None:
        """One step of one transfer, so that several take turns by pieces."""
        try:
            handle = transfer.handle
            state = self._post(transfer) if handle is None else self._agent.check_xfer_state(handle)
            if state == "PROC":
                return
            if state != "DONE":
                raise RuntimeError(f"the READ ended in state {state}")
            self._agent.release_xfer_handle(transfer.handle)
            transfer.handle = None
            self._landed(transfer)
        except Exception as error:
            self._fail(transfer, error)

    def _landed(self, transfer: _Transfer) -> None:
        """The piece goes to the verifying thread. After the last one the end is told before that has come to rest."""
        first, last = transfer.piece
        if last == transfer.size:
            self._end(transfer, None)
        elif transfer.reading.stopped:
            self._end(transfer, "stopped")
        self._verifications.put(partial(transfer.landed, first, last))
        if transfer not in self._active:
            self._verifications.put(partial(self._to_loop, transfer.reading.rest))

    def _post(self, transfer: _Transfer) -> str:
        """The next piece. The call may copy the whole piece before it returns."""
        agent, first = self._agent, transfer.piece[1]
        last = min(first + max(1, PIECE_BYTES // self._memory.block_bytes), transfer.size)
        transfer.piece = first, last
        local, remote = transfer.local[first:last], transfer.remote_rows[first:last]
        if transfer.mergeable:
            local, remote = _merged(local, remote)
        transfer.handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), transfer.remote.name
        )
        transfer.posted_at = time.monotonic()
        return str(agent.transfer(transfer.handle))

    def _fail(self, transfer: _Transfer, error: Exception) -> None:
        """NIXL has given the READ up: nothing lands any more. Its connection is of no use to later ones either."""
        if transfer not in self._active:
            return
        if transfer.handle is not None:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(transfer.handle)
        transfer.remote.doomed = True
        self._end(transfer, f"{type(error).__name__}: {error}")
        self._verifications.put(partial(self._to_loop, transfer.reading.rest))

    def _end(self, transfer: _Transfer, failure: str | None) -> None:
        """Nothing arrives any more; `ReadState.rest` is up to the verifying thread, which may have a piece in hand."""
        self._to_loop(partial(transfer.reading.end, failure, verified=False))
        self._active.remove(transfer)
        transfer.remote.active -= 1
        self._bury()

    def _doom(self, peer: PeerKey) -> None:
        for remote in self._remotes.values():
            remote.doomed |= remote.peer == peer
        self._bury()

    def _bury(self) -> None:
        """Before a restarted peer can be added, the one that was has to be removed."""
        for metadata, remote in list(self._remotes.items()):
            if remote.doomed and not remote.active:
                del self._remotes[metadata]
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(remote.name)

    def _to_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)


def _descriptors(order: ReadOrder, base: int, block_bytes: int) -> tuple[Descriptors, Descriptors]:
    """(local, remote), one row per block."""
    both = []
    for block_ids, start in ((order.targets, base), (order.sources, order.opened.pool_address)):
        rows = np.zeros((block_ids.size, 3), dtype=np.uint64)
        rows[:, 0] = block_ids.astype(np.uint64) * np.uint64(block_bytes) + np.uint64(start)
        rows[:, 1] = block_bytes
        both.append(rows)
    return both[0], both[1]


def _merged(local: Descriptors, remote: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Rows that follow each other in memory on both sides, as one."""
    length = local[0, 1]
    follows = np.logical_and(np.diff(local[:, 0]) == length, np.diff(remote[:, 0]) == length)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    lengths = np.diff(starts, append=len(local)).astype(np.uint64) * length
    both = []
    for rows in (local, remote):
        merged = rows[starts]
        merged[:, 1] = lengths
        both.append(merged)
    return both[0], both[1]
