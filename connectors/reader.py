"""The reading side of an endpoint: tickets that wait here, loads under way, and what is owed to their owners.

Owns one `Load` per order, the heartbeat that renews the leases of all waiting tickets (one message per peer), and the
release obligations of tickets that will not be read. Invariants: an order starts at most one load, whatever is
delivered twice; a lease is released at most once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from actors.messages.lease import LeasesRenewed, ReleaseLease, RenewLeases, Ticket
from actors.messages.transfer import CancelLoad, HoldTicket, LoadBlocks, ReleaseTicket
from connectors.load import RELEASE_S, Load, LoadEnvironment
from connectors.transports.face import LinkLost, PeerKey

MISSED_HEARTBEATS = 3  # in a row: then the peer counts as lost, though its connection stands
MAX_REMEMBERED = 4096
MAX_LEASES_PER_HEARTBEAT = 4096

LeaseKey = tuple[PeerKey, int]


class _Remembered:
    """The last few keys, so that what comes twice is known for it."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable) -> bool:
        """False: it was there already."""
        if key in self._keys:
            return False
        self._keys[key] = None
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)
        return True


class LeaseReader:
    def __init__(self, environment: LoadEnvironment, renewal_s: float) -> None:
        self._env, self._renewal_s = environment, renewal_s
        self._loads: dict[tuple[str, int], Load] = {}
        self._ordered, self._released = _Remembered(), _Remembered()
        self._held: dict[PeerKey, dict[int, Ticket]] = {}
        self._renewing: set[PeerKey] = set()
        self._missed: dict[PeerKey, int] = {}
        self.duplicates = self.late = 0

    def start(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        tasks.start_soon(self._heartbeats)

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def num_held(self) -> int:
        return sum(len(tickets) for tickets in self._held.values())

    # ------------------------------------------------------------------ orders

    def hold(self, order: HoldTicket) -> None:
        self._hold(order.ticket)

    def load(self, order: LoadBlocks) -> None:
        key = (order.request_id, order.generation)
        if not self._ordered.add(key):
            self.duplicates += 1
            return
        self._loads[key] = load = Load(order, self._env)
        self._hold(order.ticket)
        self._tasks.start_soon(self._run, key, load)

    def cancel(self, order: CancelLoad) -> None:
        load = self._loads.get((order.request_id, order.generation))
        if load is None:
            self.late += 1
        else:
            load.cancel()

    def release(self, order: ReleaseTicket) -> None:
        ticket = order.ticket
        self._let_go(ticket)
        loading = any(
            load.order.ticket.lease_id == ticket.lease_id and load.peer == PeerKey.of(ticket)
            for load in self._loads.values()
        )
        if loading or not self._released.add((PeerKey.of(ticket), ticket.lease_id)):
            self.duplicates += 1
            return
        self._tasks.start_soon(self._discharge, ticket)

    # ------------------------------------------------------------------ tasks

    async def _run(self, key: tuple[str, int], load: Load) -> None:
        try:
            await load.run()
        finally:
            del self._loads[key]
            if load.discharged:
                self._released.add((load.peer, load.order.ticket.lease_id))
            self._let_go(load.order.ticket)

    async def _discharge(self, ticket: Ticket) -> None:
        with anyio.move_on_after(RELEASE_S):
            with suppress(LinkLost):  # its owner is gone, and the lease with it; or the lease expires by itself
                link = await self._env.peers.link(ticket)
                await link.ask(ReleaseLease(ticket.epoch, ticket.lease_id, ticket.capability))

    async def _heartbeats(self) -> None:
        while True:
            await anyio.sleep(self._renewal_s)
            for peer in list(self._held):
                if peer not in self._renewing:
                    self._renewing.add(peer)
                    self._tasks.start_soon(self._renew, peer)

    async def _renew(self, peer: PeerKey) -> None:
        tickets = list(self._held.get(peer, {}).values())[:MAX_LEASES_PER_HEARTBEAT]
        if not tickets:
            self._renewing.discard(peer)
            return
        request = RenewLeases(
            tickets[0].epoch, tuple(t.lease_id for t in tickets), tuple(t.capability for t in tickets)
        )
        try:
            with anyio.fail_after(self._renewal_s):
                link = await self._env.peers.link(tickets[0])
                reply = await link.ask(request)
        except LinkLost:
            self._missed.pop(peer, None)
        except TimeoutError:
            self._missed[peer] = self._missed.get(peer, 0) + 1
            if self._missed[peer] >= MISSED_HEARTBEATS:
                del self._missed[peer]
                self._env.peers.drop(peer, f"no answer to {MISSED_HEARTBEATS} heartbeats")
        else:
            self._missed.pop(peer, None)
            if isinstance(reply, LeasesRenewed):
                for ticket, remaining in zip(tickets, reply.remaining_s, strict=False):
                    if not remaining:
                        self._let_go(ticket)
        finally:
            self._renewing.discard(peer)

    # ------------------------------------------------------------------ private

    def _hold(self, ticket: Ticket) -> None:
        self._held.setdefault(PeerKey.of(ticket), {})[ticket.lease_id] = ticket

    def _let_go(self, ticket: Ticket) -> None:
        peer = PeerKey.of(ticket)
        tickets = self._held.get(peer, {})
        tickets.pop(ticket.lease_id, None)
        if not tickets:
            self._held.pop(peer, None)
