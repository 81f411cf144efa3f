"""The cases over nixl where UCX may use TCP only: run by test_two_processes.py in a process with UCX_TLS=tcp."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from actors.configuration import Transport
from tests.connectors.cases import a_stopped_peer_is_noticed_by_the_deadline, case


@case
async def test_nixl(case: Callable[[Transport], Awaitable[None]]) -> None:
    assert os.environ["UCX_TLS"] == "tcp"
    await case("nixl")


async def test_a_read_in_flight_from_a_stopped_peer_is_quarantined_until_quiet() -> None:
    """Over TCP the peer's own code must answer, so with SIGSTOP the READ stays in flight for certain."""
    failed = await a_stopped_peer_is_noticed_by_the_deadline("nixl")
    assert failed.quarantined
