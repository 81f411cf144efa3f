"""The faces that a way of moving blocks shows, and the errors it may raise. Whoever loads or lends knows only these.

Two planes. The *control network* carries `ControlRequest`/`ControlReply` and tells when a peer is gone; the *transport*
moves bytes of blocks. Both are handed in, so that faults and virtual peers can stand in for sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.messages.lease import ControlReply, ControlRequest, LeaseOpened, LeaseRefused, ReadBlocks, Ticket
from connectors.memory import BlockIds, KVMemory


class LinkLost(Exception):
    """The control connection to a peer is gone, or never came to be."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ReadFailed(Exception):
    """A READ ended without all its bytes."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class PeerKey(msgspec.Struct, frozen=True):
    """One life of one engine at one address."""

    engine_id: str
    epoch: int
    host: str
    port: int

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        return cls(ticket.engine_id, ticket.epoch, ticket.host, ticket.port)


class Copy(Protocol):
    """Bytes of a lease on their way out. `scope` is cancelled when the lease dies under it."""

    num_bytes: int
    scope: anyio.CancelScope

    def pieces(self) -> Iterator[memoryview]: ...


class LeaseService(Protocol):
    """What an endpoint offers to its readers."""

    memory: KVMemory

    async def answer(self, request: ControlRequest) -> ControlReply: ...
    def copy(self, request: ReadBlocks) -> AbstractContextManager[Copy | LeaseRefused]: ...


class ControlLink(Protocol):
    """One connection to one peer, shared by all that wait for it."""

    @property
    def lost(self) -> str | None:
        """Why it is gone."""

    async def ask(self, request: ControlRequest) -> ControlReply:
        """Raises LinkLost. The caller bounds the wait."""

    def on_lost(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` runs on the loop when the peer is gone (at once if it is). Returns what takes the wish back."""

    def close(self, reason: str) -> None: ...


class ControlNetwork(Protocol):
    async def listen(self, service: LeaseService, host: str, port: int, tasks: TaskGroup) -> int:
        """Serves until the task group ends; the port that was bound."""

    async def connect(self, host: str, port: int) -> ControlLink:
        """Raises LinkLost."""


class ReadOrder(msgspec.Struct, frozen=True):
    """Copy the owner's blocks `sources`, which are `indexes` in its lease, into our blocks `targets`."""

    ticket: Ticket
    opened: LeaseOpened
    indexes: BlockIds
    sources: BlockIds
    targets: BlockIds


# Positions [first, last) of the order have landed. Hashes them, so it is called off the loop.
Landed = Callable[[int, int], None]


class Reading(Protocol):
    """A READ in progress. Used on the loop only."""

    cancellable: bool  # after `stop` it is quiet within a loop turn or two, whatever the peer does

    @property
    def quiet(self) -> bool:
        """Nothing lands any more."""

    async def finished(self) -> None:
        """Returns when all has landed. Raises ReadFailed. Cancelling the wait does not stop the READ."""

    async def verified(self) -> None:
        """After `finished`: returns when the last call of `landed` has returned."""

    def stop(self) -> None:
        """Ask for no more. What is in flight may still land until it is quiet."""

    async def wait_quiet(self) -> None: ...


class Transport(Protocol):
    name: str

    @property
    def agent_metadata(self) -> bytes:
        """What a reader needs to address our memory one-sidedly; b"" where the owner's code answers."""

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        """Raises TransportUnavailable."""

    def read(self, order: ReadOrder, landed: Landed) -> Reading: ...
    def forget(self, peer: PeerKey) -> None:
        """The peer is gone: drop what is kept for it, once its READs are quiet."""

    async def stop(self) -> None: ...


class TransportUnavailable(Exception):
    """This machine or this installation cannot use the transport."""


class ReadState:
    """The common part of a Reading: its end, its quiet, and who waits for them."""

    def __init__(self, *, cancellable: bool) -> None:
        self.cancellable = cancellable
        self.failure: str | None = None
        self._ended, self._verified, self._quiet = anyio.Event(), anyio.Event(), anyio.Event()

    @property
    def quiet(self) -> bool:
        return self._quiet.is_set()

    async def finished(self) -> None:
        if not self._ended.is_set():
            await self._ended.wait()
        if self.failure is not None:
            raise ReadFailed(self.failure)

    async def verified(self) -> None:
        if not self._verified.is_set():
            await self._verified.wait()

    async def wait_quiet(self) -> None:
        await self._quiet.wait()

    def end(self, failure: str | None = None, *, verified: bool = True) -> None:
        """Nothing arrives any more: all has, unless `failure` says why not. Verification may end later."""
        self.failure = failure
        self._ended.set()
        if verified:
            self.rest()

    def rest(self) -> None:
        """All that landed has been verified: nobody touches the blocks any more."""
        self._verified.set()
        self._quiet.set()
