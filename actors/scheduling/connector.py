"""The connector's scheduler half: what of a prompt lies elsewhere, and what of it others will want.

Asked inside `schedule()`, answers at once and changes nothing; what became of a load or a lease comes as a message.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actors.messages.transfer import TransferOrder
from actors.scheduling.orders import load_blocks
from actors.scheduling.request import SchedulerRequest


class RemoteMatch(msgspec.Struct, frozen=True):
    """Tokens beyond the local prefix hit that can be loaded, as part of the step or (`is_async`) while others run."""

    num_tokens: int
    is_async: bool = False


NOTHING_REMOTE = RemoteMatch(0)


class Connector(Protocol):
    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        """None: not known yet, ask again with the next step."""

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        """The order for its blocks from `first_block` on. From here on the transfer owns the release obligation."""

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        """Leading blocks to keep for a reader after a finish with "stop" or "length"; 0: none."""


class TicketConnector:
    """A request's ticket says what lies in its prefill engine. A load is tried once: its order takes the ticket."""

    def matched(self, request: SchedulerRequest, num_local_tokens: int) -> RemoteMatch | None:
        if request.ticket is None:
            return NOTHING_REMOTE
        num_known = len(request.tokens)
        num_remote = min(request.ticket.num_tokens, num_known) - num_local_tokens
        # The last known token is computed here in any case: a load of it alone would be for nothing.
        if num_remote <= 0 or num_local_tokens >= num_known - 1:
            return NOTHING_REMOTE
        return RemoteMatch(num_remote, is_async=True)

    def order_load(self, request: SchedulerRequest, first_block: int, timeout_s: float) -> TransferOrder | None:
        assert request.ticket is not None
        order = load_blocks(request, request.ticket, first_block, timeout_s)
        request.ticket = None
        return order

    def num_blocks_to_lease(self, request: SchedulerRequest, block_size: int) -> int:
        if not request.engine_request.do_remote_decode:
            return 0
        return -(-request.num_prompt_tokens // block_size)
