"""Loads under way, leases out, blocks in quarantine: what the TransferActor was asked, and what its reports mean.

Each order has its generation and is settled by one report. A report for another generation, or a second one, is late:
`apply` answers False and nothing changes. Reports may come in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.messages.errors import RefusalReason
from actors.messages.lease import Ticket
from actors.messages.request import FinishReason, RequestOutput
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    CancelLoad,
    LeaseDenied,
    LeaseExpired,
    LeaseGranted,
    PeerLost,
    RevokeLease,
    TransferFailed,
    TransferReport,
)
from actors.scheduling.grants import Grant, GrantState
from actors.scheduling.orders import grant_lease
from actors.scheduling.request import LoadPhase, SchedulerRequest

if TYPE_CHECKING:
    from actors.scheduling.state import SchedulerState


class Load:
    """The blocks of `grant` from `first_block` on are being written, whatever becomes of the request."""

    __slots__ = ("first_block", "grant", "quiet", "request")

    def __init__(self, request: SchedulerRequest, grant: Grant, first_block: int) -> None:
        self.request = request
        self.grant = grant
        self.first_block = first_block
        self.quiet = False  # BlocksQuiet came before the failure it belongs to

    @property
    def is_wanted(self) -> bool:
        return self.request.grant is self.grant


class Lease:
    """`output` waits for the ticket; None once the client has been answered."""

    __slots__ = ("grant", "output", "request", "revoked", "ticket")

    def __init__(self, request: SchedulerRequest, grant: Grant, output: RequestOutput) -> None:
        self.request = request
        self.grant: Grant | None = grant  # None: the lease has ended, its blocks are given back
        self.output: RequestOutput | None = output
        self.revoked = False
        self.ticket: Ticket | None = None


class TransferBook:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.loads: dict[int, Load] = {}
        self.leases: dict[int, Lease] = {}
        self.quarantined: dict[int, Load] = {}

    # Decode side

    def start_load(self, request: SchedulerRequest, first_block: int, now: float) -> None:
        state, grant = self._state, request.grant
        assert grant is not None
        assert state.connector is not None
        request.load_phase = LoadPhase.IN_FLIGHT
        self.loads[grant.generation] = Load(request, grant, first_block)
        remaining = max(request.engine_request.deadline - now, 0.0)
        timeout_s = min(state.config.load_timeout_s, remaining / 2)
        order = state.connector.order_load(request, first_block, timeout_s)
        if order is not None:
            state.effects.append(order)

    def cancel_load_of(self, request: SchedulerRequest) -> None:
        """Once; the blocks stay the transfer's until its report."""
        for generation, load in self.loads.items():
            if load.request is request:
                self._state.effects.append(CancelLoad(request.request_id, generation))

    # Prefill side

    def start_lease(self, request: SchedulerRequest, grant: Grant, output: RequestOutput, now: float) -> None:
        state = self._state
        state.kv.ledger.turn(grant, GrantState.LEASED, now, "waits for its reader")
        request.story.turn("granting_lease", now)
        self.leases[grant.generation] = Lease(request, grant, output)
        state.effects.append(grant_lease(request, grant))

    def revoke_lease_of(self, request: SchedulerRequest) -> None:
        for generation, lease in list(self.leases.items()):
            if lease.request is request:
                self._revoke(generation, lease)

    def withdraw_ticket(self, request_id: str) -> RequestOutput | None:
        """An output whose ticket has not left yet: its lease is revoked, the output is the caller's to replace."""
        for effect in self._state.effects:
            if isinstance(effect, RequestOutput) and effect.request_id == request_id and effect.ticket is not None:
                for generation, lease in list(self.leases.items()):
                    if lease.ticket is effect.ticket:
                        self._revoke(generation, lease)
                return effect
        return None

    def _revoke(self, generation: int, lease: Lease) -> None:
        lease.output = None
        lease.revoked = True
        if lease.grant is None:
            del self.leases[generation]
        else:
            self._state.effects.append(RevokeLease(lease.request.request_id, generation))

    # Reports

    def apply(self, report: TransferReport, now: float) -> bool:
        """False: late, duplicate or unknown."""
        if isinstance(report, PeerLost):
            return True
        generation, request_id = report.generation, report.request_id
        match report:
            case BlocksLanded() | TransferFailed():
                load = self.loads.get(generation)
                if load is None or load.grant.request_id != request_id:
                    return False
                del self.loads[generation]
                if isinstance(report, BlocksLanded):
                    self._landed(load, now)
                else:
                    self._failed(load, report, now)
            case BlocksQuiet():
                return self._quiet(generation, request_id, now)
            case LeaseGranted() | LeaseDenied() | BlocksSent() | LeaseExpired():
                lease = self.leases.get(generation)
                if lease is None or lease.request.request_id != request_id:
                    return False
                match report:
                    case LeaseGranted():
                        return self._granted(generation, lease, report.ticket, now)
                    case LeaseDenied():
                        return self._denied(generation, lease, report, now)
                    case _:
                        return self._lease_ended(generation, lease, now)
        return True

    def _landed(self, load: Load, now: float) -> None:
        if load.is_wanted:
            load.request.load_phase = LoadPhase.REPORTED
        else:
            self._state.give_back(load.request, load.grant, now)

    def _failed(self, load: Load, report: TransferFailed, now: float) -> None:
        state, request = self._state, load.request
        was_wanted = load.is_wanted
        if was_wanted:
            request.load_phase = LoadPhase.REPORTED
            request.load_failed = True
            num_local = load.first_block * state.config.block_size
            request.num_computed_tokens = min(request.num_computed_tokens, num_local)
            request.num_cached_tokens = request.num_computed_tokens
        if report.quarantined and not load.quiet:
            self._quarantine(load, now)
        elif not was_wanted:
            state.give_back(request, load.grant, now)
        if was_wanted and state.config.kv_load_failure_policy == "fail":
            text = f"the prompt's KV blocks did not arrive: {report.reason}" + f" ({report.detail})" * bool(
                report.detail
            )
            state.end(request, FinishReason.ERROR, now, RefusalReason.KV_LOAD_FAILED, text)
        elif was_wanted:
            request.story.detail = f"load failed: {report.reason}; the rest of the prompt is computed here"

    def _quarantine(self, load: Load, now: float) -> None:
        """Only the blocks that may still be written; what was hit locally stays the request's, or is given back."""
        state, request = self._state, load.request
        was_wanted = load.is_wanted
        if load.first_block:
            local = state.kv.ledger.split(load.grant, load.first_block, now, move_head=True)
            if was_wanted:
                request.grant = local
            else:
                state.give_back(request, local, now)
        elif was_wanted:
            request.forget_blocks()
            state.unfinished_prefills.pop(request.request_id, None)  # nor does it reserve the rest
        state.kv.ledger.turn(load.grant, GrantState.QUARANTINED, now, "its failed READ may still write")
        self.quarantined[load.grant.generation] = load

    def _quiet(self, generation: int, request_id: str, now: float) -> bool:
        load = self.quarantined.get(generation)
        if load is not None and load.grant.request_id == request_id:
            del self.quarantined[generation]
            self._state.give_back(load.request, load.grant, now)
            return True
        load = self.loads.get(generation)
        if load is not None and load.grant.request_id == request_id and not load.quiet:
            load.quiet = True
            return True
        return False

    def _granted(self, generation: int, lease: Lease, ticket: Ticket, now: float) -> bool:
        if lease.output is None:
            # Revoked while the grant was on its way: the expiry will follow. Anything else is a duplicate.
            return lease.revoked
        output, lease.output = lease.output, None
        lease.ticket = ticket
        if lease.grant is None:
            del self.leases[generation]
        self._state.send_last(lease.request, msgspec.structs.replace(output, ticket=ticket), now)
        return True

    def _denied(self, generation: int, lease: Lease, report: LeaseDenied, now: float) -> bool:
        if lease.output is None and not lease.revoked:
            return False
        del self.leases[generation]
        if lease.grant is not None:
            self._state.give_back(lease.request, lease.grant, now)
        if lease.output is not None:
            lease.output = None
            output = RequestOutput(
                lease.request.request_id,
                finish_reason=FinishReason.ERROR,
                error=RefusalReason.KV_SEND_FAILED.value,
                error_text=f"the prompt's KV blocks cannot be kept for a reader: {report.reason}",
            )
            self._state.send_last(lease.request, output, now)
        return True

    def _lease_ended(self, generation: int, lease: Lease, now: float) -> bool:
        if lease.grant is None:
            return False
        grant, lease.grant = lease.grant, None
        self._state.give_back(lease.request, grant, now)
        if lease.output is None:
            del self.leases[generation]
        return True
