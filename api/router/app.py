"""The router's HTTP face: what a client sends is checked here just so far as the router itself depends on it.

Everything else of a request is for the engines to judge. Invariant: no `kv_transfer_params` of a client passes, and
every request has one deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import anyio
import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from actors.configuration import RouterConfiguration
from actors.messages.errors import RefusalReason
from api.admin import PATHS
from api.deadlines import TIMEOUT_HEADER, Timeout, header_seconds, read_body, shortest
from api.errors import ApiError, InvalidRequest
from api.middleware import REQUEST_ID, SANE_ID, add_request_id, openai_errors, request_ids, require_key
from api.openai.bodies import convert, json_object
from api.router.admin import RouterAdmin
from api.router.fleet import Engine, Fleet
from api.router.forward import Forwarder, Job, passed_on
from api.router.metrics import RouterMetrics
from api.router.upstream import Upstream, UpstreamFailed, read_all

PROTECTED = ("/v1", "/tokenize", "/debug", "/admin")
ENGINE_SECONDS = 5.0  # for an engine's part of an answer that the router puts together


class RouterApp:
    def __init__(
        self,
        configuration: RouterConfiguration,
        fleet: Fleet,
        upstream: Upstream,
        forwarder: Forwarder,
        admin: RouterAdmin,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._configuration, self._fleet, self._upstream = configuration, fleet, upstream
        self._forwarder, self._admin, self._metrics, self._clock = forwarder, admin, metrics, clock
        self.draining = False

    def application(self, new_id: Callable[[], str]) -> web.Application:
        key = require_key(self._configuration.api_key, PROTECTED)
        app = web.Application(
            middlewares=[request_ids(new_id), openai_errors, key],
            client_max_size=self._configuration.max_body_bytes,
        )
        app.on_response_prepare.append(add_request_id)
        app.router.add_post("/v1/chat/completions", self.forward)
        app.router.add_post("/v1/completions", self.forward)
        app.router.add_post("/tokenize", self.ask_any)
        app.router.add_get("/v1/models", self.ask_any)
        app.router.add_get("/v1/models/{model:.+}", self.ask_any)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/debug/engines", self.engines)
        app.router.add_get("/debug/blocks", self.blocks)
        app.router.add_get("/debug/requests/{request_id}", self.story)
        for path in PATHS:
            app.router.add_post(path, self.admin)
        return app

    async def forward(self, request: web.Request) -> web.StreamResponse:
        self._refuse_when_draining()
        arrival = self._clock()
        header, default = request.headers.get(TIMEOUT_HEADER), self._configuration.request_timeout
        body = json_object(await read_body(request, shortest(None, header_seconds(header), default)))
        if body.get("kv_transfer_params") is not None:
            raise InvalidRequest(
                "kv_transfer_params is between the router and its engines: leave it out", "kv_transfer_params"
            )
        body.pop("kv_transfer_params", None)
        seconds = timeout_of(body, header, default)
        job = Job(request[REQUEST_ID], request.path, body, arrival + seconds)
        return await self._forwarder.forward(request, job)

    async def admin(self, request: web.Request) -> web.Response:
        self._refuse_when_draining()
        return await self._admin.order(request)

    async def ask_any(self, request: web.Request) -> web.StreamResponse:
        """The first engine that answers; it is the same model everywhere."""
        self._refuse_when_draining()
        body = await read_body(request, self._configuration.request_timeout) if request.method == "POST" else None
        # The id as one part of a path: a slash or a dot in it leads nowhere else.
        path = f"/v1/models/{quote(model, safe='')}" if (model := request.match_info.get("model")) else request.path
        headers = {"X-Request-ID": request[REQUEST_ID]}
        for engine in self._healthy():
            with anyio.move_on_after(ENGINE_SECONDS):
                try:
                    url = engine.url + path
                    answer = await self._upstream.request(request.method, url, body=body, headers=headers)
                    try:
                        content = await read_all(answer)
                    finally:
                        answer.close()
                except UpstreamFailed:
                    continue
                if answer.status < 500 and answer.status not in (401, 403):
                    return passed_on(answer, content)
        raise unavailable("no engine can answer")

    def _healthy(self) -> list[Engine]:
        """Decode engines first: they are in every deployment."""
        return sorted((e for e in self._fleet.engines if e.healthy), key=lambda engine: engine.side != "decode")

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise unavailable("the router is shutting down")

    async def health(self, request: web.Request) -> web.Response:
        self._refuse_when_draining()
        if not self._fleet.serving:
            trouble = "; ".join(f"{e.engine_id}: {e.reason}" for e in self._fleet.engines if not e.healthy)
            raise unavailable(f"no engine can decode ({trouble})")
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        texts = await self._of_all("/metrics")
        good = {engine_id: body.decode() for engine_id, (status, body) in texts.items() if status == 200}
        return web.Response(body=self._metrics.exposition(good), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def engines(self, request: web.Request) -> web.Response:
        return json_response(self._fleet.listing())

    async def blocks(self, request: web.Request) -> web.Response:
        answers = await self._of_all("/debug/blocks")
        return json_response({engine_id: json_of(status, body) for engine_id, (status, body) in answers.items()})

    async def story(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        # What is no id would make another path at the engines.
        answers = await self._of_all(f"/debug/requests/{request_id}") if SANE_ID.fullmatch(request_id) else {}
        known = {engine_id: json_of(200, body) for engine_id, (status, body) in answers.items() if status == 200}
        if not known:
            raise ApiError(404, f"no engine knows a request {request_id}", code="unknown_request")
        return json_response({"request_id": request_id, "engines": known})

    async def _of_all(self, path: str) -> dict[str, tuple[int, bytes]]:
        """engine_id → (status, body), in the fleet's order; status 0 with a text for an engine that did not answer."""
        found = {engine.engine_id: (0, engine.reason.encode() or b"no answer") for engine in self._fleet.engines}

        async def ask(engine: Engine) -> None:
            with anyio.move_on_after(ENGINE_SECONDS):
                try:
                    found[engine.engine_id] = await self._upstream.get(engine.url + path)
                except UpstreamFailed as failed:
                    found[engine.engine_id] = (0, str(failed).encode())

        async with anyio.create_task_group() as tasks:
            for engine in self._fleet.engines:
                tasks.start_soon(ask, engine)
        return found


class Timed(msgspec.Struct, frozen=True):
    timeout: Timeout | None = None


def timeout_of(body: dict[str, Any], header: str | None, default: float) -> float:
    """Seconds. The shorter of field and header, when both are given. Raises InvalidRequest as an engine would."""
    return shortest(convert({"timeout": body.get("timeout")}, Timed).timeout, header_seconds(header), default)


def json_of(status: int, body: bytes) -> Any:
    if status == 200:
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {"error": "its answer is no JSON"}
    return {"error": body.decode(errors="replace")}


def json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def unavailable(text: str) -> ApiError:
    return ApiError(503, text, code=RefusalReason.ENGINE_UNAVAILABLE.value, headers={"Retry-After": "1"})
