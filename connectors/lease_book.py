"""The lease book of the prefill side: which blocks are promised to a reader, until when, and how each promise ended.

Pure: time, ids and capabilities are handed in; what follows is taken from `take_effects`.

    grant ──► live ──┬─ release ──► released ─┐                        ┌─► BlocksSent
                     ├─ expire  ──► expired  ─┼─ no copy in progress ──┤
                     └─ revoke  ──► expired  ─┘  (else AbortCopies,    └─► LeaseExpired
                                                  and wait for end_copy)

Invariants: a lease ends in exactly one `BlocksSent` or `LeaseExpired`; it is dead in the book before anybody is told;
bytes that we ourselves copy out are never freed under the copying. A lease lives until `expire` has marked it dead,
so a release or a renewal that arrives with the deadline, but before that, still counts. Late and duplicate events are
counted and answered, never raised. A wrong capability gets the answer of a lease that never was.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from actors.messages.lease import (
    KVLayout,
    LeaseRefused,
    LeaseReleased,
    LeaseRenewed,
    LeasesRenewed,
    OpenLease,
    ReadBlocks,
    RefusedLease,
    ReleaseLease,
    ReleaseOutcome,
    RenewLease,
    RenewLeases,
)
from actors.messages.transfer import BlocksSent, GrantLease, LeaseExpired
from connectors.memory import BlockIds, block_ids_of

MAX_TOMBSTONES = 4096  # expired leases remembered, to tell "expired" from "unknown"
EXTENSION = 2 / 3  # of the lease's length, counted from the renewal (reference: part D4)


class AbortCopies(msgspec.Struct, frozen=True):
    """The lease is dead: stop copying its bytes out, then say `end_copy`."""

    lease_id: int


Effect = BlocksSent | LeaseExpired | AbortCopies


class Lease:
    """One promise. `end` is set once it is dead, and reported once `copies` is 0."""

    __slots__ = (
        "block_column",
        "block_ids",
        "capability",
        "copies",
        "deadline",
        "end",
        "generation",
        "lease_id",
        "request_id",
    )

    def __init__(self, lease_id: int, capability: bytes, order: GrantLease, deadline: float) -> None:
        self.lease_id, self.capability, self.deadline = lease_id, capability, deadline
        self.request_id, self.generation = order.request_id, order.generation
        self.block_column = order.block_ids
        self.block_ids: BlockIds = block_ids_of(order.block_ids)
        self.copies = 0
        self.end: BlocksSent | LeaseExpired | None = None


class LeaseBook:
    def __init__(
        self, *, engine_id: str, epoch: int, layout: KVLayout, lease_s: float, transports: Sequence[str] = ("tcp",)
    ) -> None:
        self.engine_id, self.epoch, self.layout = engine_id, epoch, layout
        self.lease_s, self.transports = lease_s, tuple(transports)
        self._leases: dict[int, Lease] = {}  # live, or dead with a copy in progress
        self._by_request: dict[tuple[str, int], int] = {}
        self._expired: OrderedDict[int, bytes] = OrderedDict()  # lease id → capability
        self._deadlines: list[tuple[float, int]] = []  # heap; an entry may be early, never late
        self._effects: list[Effect] = []
        self.granted = self.sent = self.expired = self.late = self.duplicates = self.refused = 0

    # ------------------------------------------------------------------ from the scheduler

    def grant(self, lease_id: int, capability: bytes, order: GrantLease, now: float) -> Lease | None:
        """A new live lease, or None for an order that was granted already."""
        key = (order.request_id, order.generation)
        if key in self._by_request:
            self.duplicates += 1
            return None
        assert lease_id not in self._leases, f"lease id {lease_id} was handed in twice"
        lease = Lease(lease_id, capability, order, now + self.lease_s)
        self._leases[lease_id], self._by_request[key] = lease, lease_id
        heappush(self._deadlines, (lease.deadline, lease_id))
        self.granted += 1
        return lease

    def revoke(self, request_id: str, generation: int) -> None:
        lease = self._leases.get(self._by_request.get((request_id, generation), -1))
        if lease is None or lease.end is not None:
            self.late += 1
            return
        self._end(lease, LeaseExpired(lease.request_id, lease.generation))

    # ------------------------------------------------------------------ from the reader

    def open(self, request: OpenLease, now: float) -> Lease | LeaseRefused:
        if (request.engine_id, request.epoch) != (self.engine_id, self.epoch):
            named, here = f"{request.engine_id} epoch {request.epoch}", f"{self.engine_id} epoch {self.epoch}"
            return self._refuse(request.lease_id, RefusedLease.WRONG_EPOCH, f"the ticket names {named}, this is {here}")
        lease = self._find(request.lease_id, request.capability)
        if not isinstance(lease, Lease):
            return self._refuse(request.lease_id, lease, "open")
        if lease.deadline <= now:
            self._end(lease, LeaseExpired(lease.request_id, lease.generation))
            return self._refuse(request.lease_id, RefusedLease.EXPIRED, f"{now - lease.deadline:.3f} s ago")
        differences = self.layout.differences(request.layout)
        if request.transport not in self.transports:
            differences.append(f"transport: ours {'/'.join(self.transports)!r}, theirs {request.transport!r}")
        if differences:
            detail = f"as seen by {self.engine_id}: " + "; ".join(differences)
            return self._refuse(request.lease_id, RefusedLease.INCOMPATIBLE, detail)
        return lease

    def renew(self, request: RenewLease, now: float) -> LeaseRenewed:
        return LeaseRenewed(request.lease_id, self._renew(request.epoch, request.lease_id, request.capability, now))

    def renew_all(self, request: RenewLeases, now: float) -> LeasesRenewed:
        pairs = zip(request.lease_ids, request.capabilities, strict=False)
        return LeasesRenewed(tuple(self._renew(request.epoch, lease_id, key, now) for lease_id, key in pairs))

    def release(self, request: ReleaseLease) -> LeaseReleased:
        found = self._find(request.lease_id, request.capability) if request.epoch == self.epoch else None
        match found:
            case Lease():
                self._end(found, BlocksSent(found.request_id, found.generation))
                return LeaseReleased(request.lease_id, ReleaseOutcome.GOOD)
            case RefusedLease.EXPIRED:
                outcome = ReleaseOutcome.EXPIRED
            case _:
                outcome = ReleaseOutcome.UNKNOWN
        self.late += 1
        return LeaseReleased(request.lease_id, outcome)

    def begin_copy(self, request: ReadBlocks) -> Lease | LeaseRefused:
        """The bytes of the lease are about to be copied out, and are ours to keep still until `end_copy`."""
        if request.epoch != self.epoch:
            detail = f"the request names epoch {request.epoch}, this is {self.epoch}"
            return self._refuse(request.lease_id, RefusedLease.WRONG_EPOCH, detail)
        lease = self._find(request.lease_id, request.capability)
        if not isinstance(lease, Lease):
            return self._refuse(request.lease_id, lease, "read")
        lease.copies += 1
        return lease

    # ------------------------------------------------------------------ from the owner's own shell

    def end_copy(self, lease_id: int) -> None:
        """Exactly once for each `begin_copy` that gave a lease."""
        lease = self._leases[lease_id]
        assert lease.copies > 0, f"lease {lease_id}: a copy ended that never began"
        lease.copies -= 1
        if lease.end is not None and lease.copies == 0:
            self._report(lease, lease.end)

    def expire(self, now: float) -> None:
        """Marks every live lease dead whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None or lease.end is not None:
                continue
            if lease.deadline > now:  # renewed since this entry was made
                heappush(self._deadlines, (lease.deadline, lease_id))
            else:
                self._end(lease, LeaseExpired(lease.request_id, lease.generation))

    def next_deadline(self) -> float | None:
        """When to call `expire` next: not later than the first live lease's deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def num_live(self) -> int:
        return sum(lease.end is None for lease in self._leases.values())

    def check(self) -> None:
        """Recomputes the invariants; raises AssertionError."""
        assert self.granted == len(self._leases) + self.sent + self.expired, "a lease is lost, or ended twice"
        assert self._by_request == {(x.request_id, x.generation): x.lease_id for x in self._leases.values()}
        entries = {lease_id: deadline for deadline, lease_id in sorted(self._deadlines, reverse=True)}
        for lease in self._leases.values():
            assert lease.copies >= 0
            if lease.end is None:
                assert entries[lease.lease_id] <= lease.deadline, f"lease {lease.lease_id} would expire late"
            else:
                assert lease.copies > 0, f"lease {lease.lease_id} is dead and quiet, yet not reported"
        assert not self._leases.keys() & self._expired.keys()
        assert len(self._expired) <= MAX_TOMBSTONES

    # ------------------------------------------------------------------ private

    def _find(self, lease_id: int, capability: bytes) -> Lease | RefusedLease:
        """A live lease, or EXPIRED or UNKNOWN. Takes the same time whether the lease exists or not."""
        lease = self._leases.get(lease_id)
        expected = lease.capability if lease is not None else self._expired.get(lease_id, bytes(16))
        known = hmac.compare_digest(expected, capability) and (lease is not None or lease_id in self._expired)
        if not known:
            return RefusedLease.UNKNOWN
        if lease is None:
            return RefusedLease.EXPIRED
        if lease.end is not None:
            return RefusedLease.EXPIRED if isinstance(lease.end, LeaseExpired) else RefusedLease.UNKNOWN
        return lease

    def _renew(self, epoch: int, lease_id: int, capability: bytes, now: float) -> float:
        lease = self._find(lease_id, capability) if epoch == self.epoch else None
        if not isinstance(lease, Lease):
            self.late += 1
            return 0.0
        lease.deadline = max(lease.deadline, now + EXTENSION * self.lease_s)
        return lease.deadline - now

    def _refuse(self, lease_id: int, reason: RefusedLease, detail: str) -> LeaseRefused:
        self.refused += 1
        return LeaseRefused(lease_id, reason, detail)

    def _end(self, lease: Lease, end: BlocksSent | LeaseExpired) -> None:
        lease.end = end
        if lease.copies:
            self._effects.append(AbortCopies(lease.lease_id))
        else:
            self._report(lease, end)

    def _report(self, lease: Lease, end: BlocksSent | LeaseExpired) -> None:
        del self._leases[lease.lease_id], self._by_request[lease.request_id, lease.generation]
        if isinstance(end, LeaseExpired):
            self.expired += 1
            self._expired[lease.lease_id] = lease.capability
            if len(self._expired) > MAX_TOMBSTONES:
                self._expired.popitem(last=False)
        else:
            self.sent += 1
        self._effects.append(end)
