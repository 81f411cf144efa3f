"""The control links of the reading side: one per peer, shared by all that wait for it.

Invariants: at most one connection attempt per peer is under way, and whoever comes meanwhile waits for that one; a
failed attempt is forgotten, so the next one tries again; a link that ends is reported once, as `PeerLost`.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from actors.messages.lease import Ticket
from actors.messages.transfer import PeerLost, TransferReport
from connectors.transports.face import ControlLink, ControlNetwork, LinkLost, PeerKey


class _Attempt:
    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.link: ControlLink | None = None
        self.failure = ""


class Peers:
    def __init__(
        self, network: ControlNetwork, report: Callable[[TransferReport], None], forget: Callable[[PeerKey], None]
    ) -> None:
        self._network, self._report, self._forget = network, report, forget
        self._links: dict[PeerKey, ControlLink] = {}
        self._attempts: dict[PeerKey, _Attempt] = {}
        self.attempted = 0

    def start(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    async def link(self, ticket: Ticket) -> ControlLink:
        """Raises LinkLost. The wait is bounded by the network's connect timeout."""
        peer = PeerKey.of(ticket)
        link = self._links.get(peer)
        if link is not None:
            return link
        attempt = self._attempts.get(peer)
        if attempt is None:
            attempt = self._attempts[peer] = _Attempt()
            self.attempted += 1
            self._tasks.start_soon(self._connect, peer, attempt)
        await attempt.ended.wait()
        if attempt.link is None:
            raise LinkLost(attempt.failure)
        return attempt.link

    def drop(self, peer: PeerKey, reason: str) -> None:
        """Ends the link on our side; all that wait on it fail."""
        link = self._links.get(peer)
        if link is not None:
            link.close(reason)

    def stop(self) -> None:
        for peer in list(self._links):
            self.drop(peer, "this engine is shutting down")

    async def _connect(self, peer: PeerKey, attempt: _Attempt) -> None:
        try:
            link = await self._network.connect(peer.host, peer.port)
        except LinkLost as error:
            attempt.failure = error.reason
        else:
            attempt.link = self._links[peer] = link
            link.on_lost(lambda: self._lost(peer, link))
        finally:
            del self._attempts[peer]
            attempt.ended.set()

    def _lost(self, peer: PeerKey, link: ControlLink) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
        self._forget(peer)
        self._report(PeerLost(peer.engine_id, peer.epoch, link.lost or "unknown"))
