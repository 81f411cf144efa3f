"""The orders to the TransferActor, made from a request and its grant."""

from __future__ import annotations

from array import array

from actors.messages.lease import Ticket, prompt_digest
from actors.messages.transfer import GrantLease, LoadBlocks
from actors.scheduling.grants import Grant
from actors.scheduling.request import SchedulerRequest


def int32(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def load_blocks(request: SchedulerRequest, ticket: Ticket, first_block: int, timeout_s: float) -> LoadBlocks:
    assert request.grant is not None
    return LoadBlocks(
        request_id=request.request_id,
        generation=request.grant.generation,
        ticket=ticket,
        first_block=first_block,
        block_ids=int32(request.grant.block_ids[first_block:]),
        timeout_s=timeout_s,
    )


def grant_lease(request: SchedulerRequest, grant: Grant) -> GrantLease:
    """For a lease of the prompt: `grant` holds its blocks and no others."""
    return GrantLease(
        request_id=request.request_id,
        generation=grant.generation,
        block_ids=int32(grant.block_ids),
        num_tokens=request.num_prompt_tokens,
        prompt_digest=prompt_digest(request.engine_request.prompt_token_ids),
    )
