"""`kv_transfer_params`: the two halves of a hand-over, as the router sends them to an engine.

    {"do_remote_decode": true, …}   prefill side: compute the prompt, keep its blocks, answer with a ticket
    {"ticket": "…"}                 decode side: the prompt's blocks lie there

Invariant: a ticket that comes out of here was sealed by this deployment, for the very prompt beside it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.configuration import Role
from actors.messages.lease import Ticket, prompt_digest
from api.errors import InvalidRequest
from connectors.ticket import InvalidTicket, unseal

FIELD = "kv_transfer_params"
# What routers for other engines send beside do_remote_decode. Accepted with these values and no others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_remote_prefill": (False, None),
    "remote_engine_id": (None,),
    "remote_block_ids": (None,),
    "remote_host": (None,),
    "remote_port": (None,),
}


class Handover(msgspec.Struct, frozen=True):
    do_remote_decode: bool = False
    ticket: Ticket | None = None


def parse_handover(params: dict[str, Any], role: Role, secret: bytes | None) -> Handover:
    """Raises InvalidRequest for a forged ticket, another shape, or the wrong role."""
    if secret is None:
        raise _invalid("this engine has no secret for hand-overs: start it with --kv-secret-file")
    if "ticket" in params:
        if role == "prefill":
            raise _invalid("a ticket is for a decode engine; this one is of role prefill")
        return Handover(ticket=_unsealed(params, secret))
    if params.get("do_remote_decode") is not True:
        raise _invalid("it must be {'do_remote_decode': true} or {'ticket': '…'}")
    if role == "decode":
        raise _invalid("do_remote_decode is for a prefill engine; this one is of role decode")
    for name, value in params.items():
        if name != "do_remote_decode" and not any(value is choice for choice in NEUTRAL.get(name, ())):
            raise _invalid(f"{name!r} is unknown or not at its neutral value", f"{FIELD}.{name}")
    return Handover(do_remote_decode=True)


def _unsealed(params: dict[str, Any], secret: bytes) -> Ticket:
    sealed = params["ticket"]
    if not isinstance(sealed, str) or len(params) != 1:
        raise _invalid("beside the text 'ticket' nothing is accepted", f"{FIELD}.ticket")
    try:
        return unseal(sealed, secret)
    except InvalidTicket as error:
        raise _invalid(str(error), f"{FIELD}.ticket") from error


def check_ticket(ticket: Ticket, prompt_token_ids: tuple[int, ...]) -> None:
    """Raises InvalidRequest unless the ticket's blocks hold a beginning of this prompt."""
    covered = prompt_token_ids[: ticket.num_tokens]
    if not 1 <= ticket.num_tokens <= len(prompt_token_ids) or prompt_digest(covered) != ticket.prompt_digest:
        raise _invalid(
            f"the ticket is for another prompt: it covers {ticket.num_tokens} tokens, this prompt has "
            f"{len(prompt_token_ids)}",
            f"{FIELD}.ticket",
        )


def _invalid(message: str, param: str = FIELD) -> InvalidRequest:
    return InvalidRequest(f"{FIELD!r}: {message}", param)
