"""`/admin` on the router: the same order to every engine at once, and one answer with what each of them said.

Invariant: every engine of the fleet is in the answer, and it is a 200 only if all of them did as they were told. An
engine is known by its URL; two may bear one id, and before its first probe an engine has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from aiohttp import web

from actors.configuration import RouterConfiguration
from actors.messages.errors import RefusalReason
from api.admin import read_order
from api.deadlines import TIMEOUT_HEADER
from api.errors import ApiError
from api.middleware import REQUEST_ID, json_response
from api.router.fleet import Engine, Fleet
from api.router.upstream import Upstream, UpstreamFailed, read_all
from api.router.waits import Waits

GRACE_SECONDS = 5.0  # beyond the deadline, for the engine's own word that it has passed


class RouterAdmin:
    def __init__(
        self,
        configuration: RouterConfiguration,
        fleet: Fleet,
        upstream: Upstream,
        waits: Waits,
        clock: Callable[[], float],
    ) -> None:
        self._configuration, self._fleet, self._upstream = configuration, fleet, upstream
        self._waits, self._clock = waits, clock

    async def order(self, request: web.Request) -> web.Response:
        arrival = self._clock()
        order = await read_order(request, self._configuration.request_timeout)
        deadline = arrival + order.seconds
        engines = list(self._fleet.engines)
        answers: dict[str, tuple[int, Any]] = {}  # by URL

        async def ask(engine: Engine) -> None:
            answers[engine.url] = await self._ask(engine, request, order.raw, deadline)

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(ask, engine)
        worst = max(status for status, _ in answers.values())
        names = _names(engines)
        return json_response({names[engine.url]: answers[engine.url][1] for engine in engines}, worst)

    async def _ask(self, engine: Engine, request: web.Request, body: bytes, deadline: float) -> tuple[int, Any]:
        """Status and answer. Whatever is no answer of the engine's is an error that says so."""
        seconds = max(deadline - self._clock(), 0.001)
        headers = {"X-Request-ID": request[REQUEST_ID], TIMEOUT_HEADER: f"{seconds:.3f}"}
        with self._waits.wait(engine.url, deadline + GRACE_SECONDS) as wait:
            try:
                answer = await self._upstream.request("POST", engine.url + request.path, body=body, headers=headers)
                try:
                    return _understood(engine, answer.status, await read_all(answer))
                finally:
                    answer.close()
            except UpstreamFailed as failed:
                return _failure(503, RefusalReason.ENGINE_UNAVAILABLE, f"{engine.engine_id}: {failed}")
        if wait.ended_by == "drained":
            return _failure(503, RefusalReason.ENGINE_UNAVAILABLE, "the router is shutting down")
        if wait.ended_by == "lost":
            return _failure(503, RefusalReason.ENGINE_UNAVAILABLE, f"{engine.engine_id} is lost: {engine.reason}")
        return _failure(504, RefusalReason.DEADLINE_EXCEEDED, f"{engine.engine_id} has not answered in time")


def _names(engines: Sequence[Engine]) -> dict[str, str]:
    """URL → the engine's id, or the URL itself where the id is unknown or another engine's, too."""
    ids = Counter(engine.engine_id for engine in engines)
    return {engine.url: engine.engine_id if ids[engine.engine_id] == 1 else engine.url for engine in engines}


def _understood(engine: Engine, status: int, body: bytes) -> tuple[int, Any]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _failure(502, RefusalReason.INTERNAL, f"{engine.engine_id} answered {status} without JSON")
    if status in (HTTPStatus.OK, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:
        return status, answer
    # The order is right and the client's key is good: this is between router and engine.
    return HTTPStatus.BAD_GATEWAY.value, answer


def _failure(status: int, reason: RefusalReason, text: str) -> tuple[int, Any]:
    return status, ApiError(status, text, code=reason.value).as_dict()
