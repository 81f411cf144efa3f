"""Engines that do as told, and a real router in front of them, all in the test's own event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
from aiohttp import web

from actors.configuration import RouterConfiguration
from api.admin import PATHS
from api.router.process import serve_router

KEY = "secret"
PROBE_INTERVAL_S = 0.02
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class FakeEngine:
    """`behave` answers completions, `obey` what is under /admin. What came in is in `requests` and `orders`."""

    def __init__(self, engine_id: str, behave: Behaviour | None = None, **report: Any) -> None:
        self.engine_id, self.role = engine_id, engine_id.partition("-")[0]
        self.report: dict[str, Any] = {
            "engine_id": engine_id,
            "role": self.role,
            "pid": 17,
            "worker_pids": [18],
            "epoch": 1,
            "healthy": True,
            "reason": "",
            "kv_layout": {"dtype": "float32"},
            **report,
        }
        self.behave = behave or (hands_over if self.role == "prefill" else answers)
        self.obey: Behaviour = obeys
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.orders: list[tuple[str, dict[str, str], bytes]] = []  # path, headers, body
        self.arrived, self.cancelled = anyio.Event(), anyio.Event()
        self.probes_hang = False
        self.url = ""
        self._probes = 0
        self._probed = anyio.Event()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    async def start(self, stack: AsyncExitStack) -> None:
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        for path in PATHS:
            app.router.add_post(path, self._order)
        app.router.add_get("/debug/engine", self._report)
        app.router.add_get("/debug/blocks", self._json({"usable": 4, "engine": self.engine_id}))
        app.router.add_get("/debug/requests/known", self._json({"intervals": [self.engine_id]}))
        app.router.add_get("/v1/models", self._json({"data": [{"id": "fake"}]}))
        app.router.add_post("/tokenize", self._json({"tokens": [1, 2], "count": 2}))
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _report(self, request: web.Request) -> web.Response:
        self._probes += 1
        self._probed.set()
        self._probed = anyio.Event()
        if self.probes_hang:
            await anyio.sleep_forever()
        return web.json_response(self.report)

    async def known(self) -> None:
        """Returns when the router has taken in what the engine says now: its next probe but one has begun."""
        for _ in range(2):
            await self._probed.wait()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        self.arrived.set()
        try:
            return await self.behave(request, body)
        except BaseException:
            self.cancelled.set()
            raise

    async def _order(self, request: web.Request) -> web.StreamResponse:
        self.orders.append((request.path, dict(request.headers), await request.read()))
        self.arrived.set()
        return await self.obey(request, {})

    @staticmethod
    def _json(value: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            if request.headers.get("Authorization") != f"Bearer {KEY}":
                return web.json_response({"error": {"message": "no key"}}, status=401)
            return web.json_response(value)

        return handler

    async def _metrics(self, request: web.Request) -> web.Response:
        text = (
            "# HELP kvyard_kv_blocks Blocks.\n# TYPE kvyard_kv_blocks gauge\n"
            f'kvyard_kv_blocks{{state="free"}} {len(self.requests)}\n'
            "# HELP kvyard_requests_total Requests.\n# TYPE kvyard_requests_total counter\n"
            f'kvyard_requests_total{{outcome="stop"}} {len(self.requests)}\n'
        )
        return web.Response(text=text)


async def hands_over(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"id": "p", "kv_transfer_params": {"ticket": "sealed"}})


async def obeys(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"done": True})


async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "ab"}]})
    response = await stream_of(request)
    await response.write(event("a"))
    await response.write(event("b") + DONE)
    return response


async def hangs(request: web.Request, body: dict[str, Any]) -> web.Response:
    await anyio.sleep_forever()
    raise AssertionError


def fails(status: int, code: str | None = None, **headers: str) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.Response:
        error = {"error": {"message": f"fake {status}", "type": "t", "param": "p", "code": code}}
        return web.json_response(error, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return behave


async def cuts_the_line(request: web.Request, body: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    raise AssertionError("the line is cut")


async def stream_of(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    return response


class Router:
    def __init__(self, url: str, session: aiohttp.ClientSession, stop: Any) -> None:
        self.url, self.session, self._stop = url, session, stop

    def post(self, path: str = "/v1/completions", **keywords: Any) -> Any:
        keywords.setdefault("json", {"prompt": "x", "stream": True})
        return self.session.post(self.url + path, **keywords)

    def get(self, path: str) -> Any:
        return self.session.get(self.url + path)

    async def stop(self) -> None:
        """What a SIGTERM does."""
        await self._stop.send(None)


@asynccontextmanager
async def deployment(*engines: FakeEngine, wait: bool = True, **changed: Any) -> AsyncIterator[Router]:
    """A router that has probed all engines; its client sends the key."""
    stop, stopped = anyio.create_memory_object_stream[None](2)
    ports: list[int] = []
    started = anyio.Event()

    def on_start(port: int) -> None:
        ports.append(port)
        started.set()

    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start(stack)
        settings: dict[str, Any] = {
            "prefill": tuple(engine.url for engine in engines if engine.role == "prefill"),
            "decode": tuple(engine.url for engine in engines if engine.role != "prefill"),
            "port": 0,
            "api_key": KEY,
            "probe_interval": PROBE_INTERVAL_S,
            **changed,
        }
        session = await stack.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}, timeout=aiohttp.ClientTimeout(30))
        )
        async with stop, stopped, anyio.create_task_group() as tasks:
            tasks.start_soon(serve_router, RouterConfiguration(**settings), on_start, stopped)
            await started.wait()
            if wait:
                for engine in engines:
                    await engine.known()
            yield Router(f"http://127.0.0.1:{ports[0]}", session, stop)
            tasks.cancel_scope.cancel()
