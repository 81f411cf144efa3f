"""The lending side: the lease book with its clock, checksums and timer, as a `LeaseService` for the control network.

Owns every decision that the book leaves open: ids, capabilities, when to look at the clock. Checksums are computed
once, on a thread, from the moment of the grant on; an `OpenLease` that comes sooner waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import anyio

from actors.messages.lease import (
    ControlReply,
    ControlRequest,
    LeaseOpened,
    LeaseRefused,
    OpenLease,
    ReadBlocks,
    RefusedLease,
    ReleaseLease,
    RenewLease,
    RenewLeases,
    Ticket,
)
from actors.messages.transfer import (
    GrantLease,
    LeaseDenied,
    LeaseGranted,
    RevokeLease,
    TransferReport,
)
from connectors.checksums import ChecksumThread
from connectors.lease_book import AbortCopies, Lease, LeaseBook
from connectors.memory import BlockIds, KVMemory, block_ids_of, runs


class OutgoingCopy:
    """The blocks of one `ReadBlocks`, merged where they are neighbours in the pool."""

    def __init__(self, memory: KVMemory, block_ids: BlockIds) -> None:
        self.num_bytes = block_ids.size * memory.block_bytes
        self.scope = anyio.CancelScope()
        self._memory, self._block_ids = memory, block_ids

    def pieces(self) -> Iterator[memoryview]:
        for start, length in runs(self._block_ids):
            yield self._memory.span(int(self._block_ids[start]), length)


class LeaseOwner:
    def __init__(
        self,
        *,
        book: LeaseBook,
        memory: KVMemory,
        checksums: ChecksumThread,
        clock: Callable[[], float],
        token_bytes: Callable[[int], bytes],
        report: Callable[[TransferReport], None],
        agent_metadata: Callable[[str], bytes],
    ) -> None:
        self.book, self.memory = book, memory
        self._checksums, self._clock, self._token_bytes, self._report = checksums, clock, token_bytes, report
        self._agent_metadata = agent_metadata  # transport name → what its readers need
        self._sums: dict[tuple[str, int], Future[bytes]] = {}
        self._copies: dict[int, list[OutgoingCopy]] = {}
        self._last_lease_id = 0
        self._changed = anyio.Event()

    # ------------------------------------------------------------------ from the scheduler

    def grant(self, order: GrantLease, *, host: str, port: int, transport: str) -> None:
        block_ids = block_ids_of(order.block_ids)
        if not block_ids.size or not self.memory.holds(block_ids):
            reason = f"{block_ids.size} blocks, of which some lie outside the pool of {self.memory.num_blocks}"
            self._report(LeaseDenied(order.request_id, order.generation, reason if block_ids.size else "no blocks"))
            return
        lease_id, capability = self._last_lease_id + 1, self._token_bytes(16)
        lease = self.book.grant(lease_id, capability, order, self._clock())
        if lease is None:
            return
        self._last_lease_id = lease_id
        self._sums[order.request_id, order.generation] = self._checksums.compute(self.memory, block_ids)
        ticket = Ticket(
            engine_id=self.book.engine_id,
            epoch=self.book.epoch,
            host=host,
            port=port,
            lease_id=lease_id,
            capability=capability,
            num_tokens=order.num_tokens,
            prompt_digest=order.prompt_digest,
            transport=transport,
        )
        self._report(LeaseGranted(order.request_id, order.generation, ticket))
        self._changed.set()

    def revoke(self, order: RevokeLease) -> None:
        self.book.revoke(order.request_id, order.generation)
        self._apply()

    # ------------------------------------------------------------------ from readers

    async def answer(self, request: ControlRequest) -> ControlReply:
        try:
            match request:
                case OpenLease():
                    return await self._open(request)
                case RenewLease():
                    return self.book.renew(request, self._clock())
                case RenewLeases():
                    return self.book.renew_all(request, self._clock())
                case ReleaseLease():
                    return self.book.release(request)
                case ReadBlocks():
                    return LeaseRefused(request.lease_id, RefusedLease.INCOMPATIBLE, "this network moves no bytes")
        finally:
            self._apply()

    async def _open(self, request: OpenLease) -> LeaseOpened | LeaseRefused:
        lease = self.book.open(request, self._clock())
        if not isinstance(lease, Lease):
            return lease
        computing = self._sums[lease.request_id, lease.generation]
        checksums = computing.result() if computing.done() else await asyncio.wrap_future(computing)
        if lease.end is not None:
            return LeaseRefused(request.lease_id, RefusedLease.EXPIRED, "while its checksums were computed")
        return LeaseOpened(
            lease_id=lease.lease_id,
            block_ids=lease.block_column,
            checksums=checksums,
            remaining_s=lease.deadline - self._clock(),
            pool_address=self.memory.address,
            agent_metadata=self._agent_metadata(request.transport),
        )

    @contextmanager
    def copy(self, request: ReadBlocks) -> Iterator[OutgoingCopy | LeaseRefused]:
        """While it is open the book keeps the blocks; its scope is cancelled when the lease dies meanwhile."""
        lease = self.book.begin_copy(request)
        if not isinstance(lease, Lease):
            yield lease
            return
        indexes = block_ids_of(request.indexes[: len(request.indexes) // 4 * 4])
        valid = indexes.size > 0 and indexes.min() >= 0 and indexes.max() < lease.block_ids.size
        copy = OutgoingCopy(self.memory, lease.block_ids[indexes] if valid else lease.block_ids[:0])
        copies = self._copies.setdefault(lease.lease_id, [])
        copies.append(copy)
        try:
            if valid:
                yield copy
            else:
                detail = f"it has {lease.block_ids.size} blocks, others were asked for"
                yield LeaseRefused(request.lease_id, RefusedLease.INCOMPATIBLE, detail)
        finally:
            copies.remove(copy)
            if not copies:
                self._copies.pop(lease.lease_id, None)
            self.book.end_copy(lease.lease_id)
            self._apply()

    # ------------------------------------------------------------------ time and effects

    async def run(self) -> None:
        """Expires leases when their time has come. Wakes for nothing else."""
        while True:
            self._changed = anyio.Event()
            self.book.expire(self._clock())
            self._apply()
            deadline = self.book.next_deadline()
            if deadline is None:
                await self._changed.wait()
                continue
            with anyio.move_on_after(max(0.001, deadline - self._clock())):
                await self._changed.wait()

    def _apply(self) -> None:
        for effect in self.book.take_effects():
            if isinstance(effect, AbortCopies):
                for copy in self._copies.get(effect.lease_id, []):
                    copy.scope.cancel()
            else:
                self._sums.pop((effect.request_id, effect.generation), None)
                self._report(effect)
