"""One load of the reading side: open → READ → verify → release, and its one report.

    run ─► open ─► READ, verify ─► release "good" ─► BlocksLanded
             └───────┴────────────────┴─ anything else ─► stop the READ
                   ├─ nothing lands any more ─► TransferFailed
                   └─ in flight still ────────► TransferFailed(quarantined) … quiet … BlocksQuiet

Invariants: `run` reports exactly one of `BlocksLanded` and `TransferFailed`, the latter unquarantined only when nothing
lands any more; `BlocksQuiet` follows every quarantined one; the release obligation is discharged on every way out
while the peer can be reached. The release is asked for as soon as all bytes are here; the last of them are verified
while its answer is on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
import numpy as np

from actors.messages.lease import (
    KVLayout,
    LeaseOpened,
    LeaseRefused,
    LeaseReleased,
    OpenLease,
    RefusedLease,
    ReleaseLease,
    ReleaseOutcome,
)
from actors.messages.transfer import BlocksLanded, BlocksQuiet, LoadBlocks, TransferFailed, TransferReport
from connectors.checksums import differing
from connectors.memory import KVMemory, block_ids_of
from connectors.peers import Peers
from connectors.transports.face import (
    ControlLink,
    LinkLost,
    PeerKey,
    ReadFailed,
    Reading,
    ReadOrder,
    Transport,
)

GRACE_S = 0.02  # for a READ whose peer was killed to notice it by itself, before its blocks are quarantined
RELEASE_S = 2.0  # longest wait for a release whose answer no longer matters

T = TypeVar("T")

REASONS = {
    RefusedLease.EXPIRED: "expired",
    RefusedLease.UNKNOWN: "unknown",
    RefusedLease.WRONG_CAPABILITY: "unknown",
    RefusedLease.INCOMPATIBLE: "incompatible",
    RefusedLease.WRONG_EPOCH: "wrong_epoch",
    RefusedLease.OVERLOADED: "refused",
}


class LoadFailed(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class LoadEnvironment:
    """What every load of an endpoint shares."""

    def __init__(
        self,
        *,
        engine_id: str,
        layout: KVLayout,
        memory: KVMemory,
        peers: Peers,
        transports: Mapping[str, Transport],
        clock: Callable[[], float],
        report: Callable[[TransferReport], None],
    ) -> None:
        self.engine_id, self.layout, self.memory = engine_id, layout, memory
        self.peers, self.transports, self.clock, self.report = peers, transports, clock, report


class Load:
    def __init__(self, order: LoadBlocks, environment: LoadEnvironment) -> None:
        self.order, self._env = order, environment
        self.peer = PeerKey.of(order.ticket)
        self.discharged = False  # the owner has been told, or cannot be
        self._scope = anyio.CancelScope()
        self._cancelled = False
        self._reading: Reading | None = None
        self._verified = 0
        self._wrong: list[int] = []  # local blocks whose bytes are not the sender's

    def cancel(self) -> None:
        self._cancelled = True
        self._scope.cancel()

    async def run(self) -> None:
        order, env = self.order, self._env
        started = env.clock()
        failure: LoadFailed | None = None
        with self._scope, anyio.move_on_after(order.timeout_s):
            try:
                num_bytes = await self._transfer()
            except LoadFailed as error:
                failure = error
            except LinkLost as error:
                failure = LoadFailed("peer_lost", error.reason)
            else:
                env.report(BlocksLanded(order.request_id, order.generation, num_bytes, env.clock() - started))
                return
        if failure is None:
            failure = LoadFailed("cancelled") if self._cancelled else LoadFailed("deadline", f"{order.timeout_s:g} s")
        await self._fail(failure, started + order.timeout_s)

    # ------------------------------------------------------------------ the way in

    async def _transfer(self) -> int:
        """Bytes read. Raises LoadFailed, LinkLost."""
        env, ticket = self._env, self.order.ticket
        targets = block_ids_of(self.order.block_ids)
        if not env.memory.holds(targets):
            raise LoadFailed("invalid", "a block lies outside the pool")
        link = await env.peers.link(ticket)
        if targets.size:
            transport = env.transports.get(ticket.transport) or env.transports.get("tcp")
            if transport is None:
                raise LoadFailed("incompatible", f"transport: ours {list(env.transports)}, theirs {ticket.transport}")
            opened = await self._open(link, transport.name)
            await self._read(link, transport, self._plan(opened, targets.size), opened)
        outcome = await self._release(link)
        if self._reading is not None:
            await self._reading.verified()
        if outcome is not ReleaseOutcome.GOOD:
            raise LoadFailed(outcome.value, "at release: what was read may be of another request")
        if self._wrong or self._verified != targets.size:
            detail = f"local blocks {self._wrong[:8]} of {targets.size}, {self._verified} looked at"
            raise LoadFailed("checksum", detail)
        return int(targets.size) * env.memory.block_bytes

    async def _open(self, link: ControlLink, transport: str) -> LeaseOpened:
        env, ticket = self._env, self.order.ticket
        reply = await link.ask(
            OpenLease(
                engine_id=ticket.engine_id,
                epoch=ticket.epoch,
                lease_id=ticket.lease_id,
                capability=ticket.capability,
                layout=env.layout,
                reader_engine_id=env.engine_id,
                transport=transport,
            )
        )
        match reply:
            case LeaseOpened():
                return reply
            case LeaseRefused():
                self.discharged = reply.reason is not RefusedLease.INCOMPATIBLE
                if reply.reason is RefusedLease.WRONG_EPOCH:
                    env.peers.drop(self.peer, "the engine there is another one")
                raise LoadFailed(REASONS[reply.reason], reply.detail)
            case _:
                raise LoadFailed("refused", f"a {type(reply).__name__} in answer to OpenLease")

    def _plan(self, opened: LeaseOpened, size: int) -> ReadOrder:
        sources, first = block_ids_of(opened.block_ids), self.order.first_block
        if not 0 <= first <= first + size <= sources.size or len(opened.checksums) != 8 * sources.size:
            raise LoadFailed("invalid", f"blocks {first} to {first + size} of a lease of {sources.size}")
        return ReadOrder(
            ticket=self.order.ticket,
            opened=opened,
            indexes=np.arange(first, first + size, dtype=np.int32),
            sources=sources[first : first + size],
            targets=block_ids_of(self.order.block_ids),
        )

    async def _read(self, link: ControlLink, transport: Transport, plan: ReadOrder, opened: LeaseOpened) -> None:
        """READ; each piece is verified as it lands, which may take a little longer."""
        env = self._env
        expected = np.frombuffer(opened.checksums, dtype="<u8")[plan.indexes]

        def landed(first: int, last: int) -> None:
            self._verified += last - first
            self._wrong.extend(differing(env.memory, plan.targets[first:last], expected[first:last]))

        self._reading = reading = transport.read(plan, landed)
        try:
            await _unless_lost(link, reading.finished)
        except ReadFailed as error:
            outcome = await self._release(link)  # the owner knows better why
            reason = "read_failed" if outcome is ReleaseOutcome.GOOD else outcome.value
            raise LoadFailed(reason, error.detail) from error

    async def _release(self, link: ControlLink) -> ReleaseOutcome:
        """Asked once at most. Raises LinkLost, LoadFailed."""
        ticket = self.order.ticket
        self.discharged = True
        reply = await link.ask(ReleaseLease(ticket.epoch, ticket.lease_id, ticket.capability))
        if not isinstance(reply, LeaseReleased):
            raise LoadFailed("refused", f"a {type(reply).__name__} in answer to ReleaseLease")
        return reply.outcome

    # ------------------------------------------------------------------ the way out

    async def _fail(self, failure: LoadFailed, deadline: float) -> None:
        quarantined = not await self._come_to_rest(deadline)
        order = self.order
        self._env.report(
            TransferFailed(
                order.request_id,
                order.generation,
                failure.reason,
                failure.detail,
                quarantined=quarantined,
                peer_engine_id=order.ticket.engine_id,
            )
        )
        if failure.reason != "peer_lost":
            await self._discharge()
        if quarantined and self._reading is not None:
            await self._reading.wait_quiet()
            self._env.report(BlocksQuiet(order.request_id, order.generation))

    async def _come_to_rest(self, deadline: float) -> bool:
        """Whether nothing lands any more. A cancelled load may use the rest of its time for it, any other a moment."""
        reading = self._reading
        if reading is None:
            return True
        reading.stop()
        rest = deadline - self._env.clock() if self._cancelled else 0.0
        with anyio.move_on_after(float("inf") if reading.cancellable else max(GRACE_S, rest)):
            await reading.wait_quiet()
        return reading.quiet

    async def _discharge(self) -> None:
        """Tell the owner that its lease is no longer needed, if it has not been told."""
        if self.discharged:
            return
        with anyio.move_on_after(RELEASE_S), contextlib.suppress(LinkLost, LoadFailed):
            await self._release(await self._env.peers.link(self.order.ticket))


async def _unless_lost(link: ControlLink, wait: Callable[[], Awaitable[T]]) -> T:
    """The result of `wait`, or LinkLost as soon as the peer is gone."""
    with anyio.CancelScope() as scope:
        take_back = link.on_lost(scope.cancel)
        try:
            return await wait()
        finally:
            take_back()
    raise LinkLost(link.lost or "the peer is gone")
