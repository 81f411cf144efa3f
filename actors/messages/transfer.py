"""SchedulerActor ↔ TransferActor: which blocks to load, to keep under a lease, to let go, and what became of it.

`generation` counts the grants of blocks to a request. A report whose generation is not the current one is late: it is
counted and ignored. Every order below ends in exactly one report, named in its docstring.
"""

from __future__ import annotations

import msgspec

from actors.messages.lease import Ticket


class HoldTicket(msgspec.Struct, frozen=True, tag=True):
    """A request with this ticket waits here: renew its lease by heartbeat until it is loaded or released. No report."""

    request_id: str
    ticket: Ticket


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """READ remote blocks [first_block, first_block + len(block_ids)) into the local blocks; verify; release the lease.

    Ends in `BlocksLanded` or `TransferFailed`.
    """

    request_id: str
    generation: int
    ticket: Ticket
    first_block: int  # index into the lease's blocks; those before it were in the local prefix cache
    block_ids: bytes  # int32 little-endian, local blocks
    timeout_s: float


class CancelLoad(msgspec.Struct, frozen=True, tag=True):
    """The request is gone. Ends, like the load itself, in its one report; then its blocks are quiet."""

    request_id: str
    generation: int


class ReleaseTicket(msgspec.Struct, frozen=True, tag=True):
    """The request will not read: discharge its release obligation. No report."""

    request_id: str
    ticket: Ticket


class GrantLease(msgspec.Struct, frozen=True, tag=True):
    """The prompt's blocks are computed: keep them for a reader. Answered by `LeaseGranted` or `LeaseDenied`.

    A granted lease ends in `BlocksSent` or `LeaseExpired`.
    """

    request_id: str
    generation: int
    block_ids: bytes  # int32 little-endian
    num_tokens: int
    prompt_digest: bytes  # goes into the ticket


class RevokeLease(msgspec.Struct, frozen=True, tag=True):
    """The ticket never reached its client. Ends the lease at once: in `LeaseExpired`."""

    request_id: str
    generation: int


class LeaseGranted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    generation: int
    ticket: Ticket


class LeaseDenied(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    generation: int
    reason: str


class BlocksLanded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All blocks are on the device, their checksums are right and the lease's owner said "good"."""

    request_id: str
    generation: int
    num_bytes: int = 0
    seconds: float = 0.0


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block of this load may be used. `quarantined`: bytes may still land in them; `BlocksQuiet` will follow."""

    request_id: str
    generation: int
    reason: (
        str  # one word for metrics: "expired", "checksum", "deadline", "peer_lost", "incompatible", "cancelled", ...
    )
    detail: str = ""
    quarantined: bool = False
    peer_engine_id: str = ""


class BlocksQuiet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The quarantined READ has ended for good: its blocks are free."""

    request_id: str
    generation: int


class BlocksSent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reader released the lease, having read or refused."""

    request_id: str
    generation: int


class LeaseExpired(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    generation: int


class PeerLost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The control connection to a peer ended. Its loads fail on their own; this is for the metrics and the log."""

    engine_id: str
    epoch: int
    reason: str


TransferOrder = HoldTicket | LoadBlocks | CancelLoad | ReleaseTicket | GrantLease | RevokeLease
TransferReport = (
    LeaseGranted | LeaseDenied | BlocksLanded | TransferFailed | BlocksQuiet | BlocksSent | LeaseExpired | PeerLost
)
