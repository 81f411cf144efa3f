"""How long a request may take: what its field and header ask for, and the reading of a body within that time.

Shared by engine and router, so that both refuse the same with the same words. Invariant: nobody waits for ever for a
body that does not come.
"""

from __future__ import annotations

import math
from typing import Annotated

import anyio
from aiohttp import web
from msgspec import Meta

from actors.messages.errors import RefusalReason, RequestRefused
from api.errors import InvalidRequest

TIMEOUT_HEADER = "X-Request-Timeout"
LONGEST_TIMEOUT = 30 * 86400.0  # seconds; timers of an event loop take no number at all

Timeout = Annotated[float, Meta(gt=0)]


def header_seconds(header: str | None) -> float | None:
    """What X-Request-Timeout leaves to this hop. Raises InvalidRequest."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", TIMEOUT_HEADER)
    return seconds


def shortest(field: float | None, header: float | None, default: float) -> float:
    """Seconds from arrival to the deadline."""
    asked = [seconds for seconds in (field, header) if seconds is not None]
    return min([*asked, LONGEST_TIMEOUT]) if asked else default


def deadline_exceeded() -> RequestRefused:
    return RequestRefused(RefusalReason.DEADLINE_EXCEEDED, "the deadline passed before the answer was whole")


async def read_body(request: web.Request, seconds: float) -> bytes:
    """Raises RequestRefused when it has not come in time. What it says of its own deadline is not known until then."""
    with anyio.move_on_after(seconds):
        return await request.read()
    raise deadline_exceeded()
