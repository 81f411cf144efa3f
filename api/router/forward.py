"""Carries one request through the fleet: does what its `Route` says and tells the route what came of it.

Nothing goes to the client before the first byte of a decode engine's answer is here; until then every failure is the
route's to mend. A stream is passed on as it comes, cut only between events: if the engine dies inside one, the client
sees whole events, then an error event, and no `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import msgspec
from aiohttp import web

from actors.messages.errors import RefusalReason, RequestRefused
from api.deadlines import TIMEOUT_HEADER
from api.errors import ApiError, of_refusal
from api.middleware import error_response
from api.router.fleet import Fleet
from api.router.metrics import RouterMetrics
from api.router.route import AskDecode, AskPrefill, Effect, PassOn, Question, Refuse, Route
from api.router.upstream import Upstream, UpstreamFailed, read_all, read_some, reply_of
from api.router.waits import Wait, Waits

OUTCOME = web.ResponseKey("outcome", str)
PASSED_HEADERS = ("Content-Type", "Cache-Control", "Retry-After", "X-Accel-Buffering")
LAST_WORDS_SECONDS = 1.0  # for the error event to a client that may not be reading


class Job(msgspec.Struct, frozen=True):
    """A client's request. `deadline` is on the router's clock."""

    request_id: str
    path: str
    body: dict[str, Any]
    deadline: float


class Forwarder:
    def __init__(
        self, fleet: Fleet, upstream: Upstream, waits: Waits, metrics: RouterMetrics, clock: Callable[[], float]
    ) -> None:
        self._fleet, self._upstream, self._waits, self._metrics, self._clock = fleet, upstream, waits, metrics, clock

    async def forward(self, request: web.Request, job: Job) -> web.StreamResponse:
        route = Route(self._fleet, job.deadline)
        outcome = "client_gone"
        try:
            with self._waits.request():
                response = await self._follow(request, job, route)
            outcome = response.get(OUTCOME) or outcome_of(response.status)
            return response
        finally:
            self._metrics.request_ended(outcome, route.retries)

    async def _follow(self, request: web.Request, job: Job, route: Route) -> web.StreamResponse:
        done: Effect | web.StreamResponse = route.start(self._clock())
        while not isinstance(done, web.StreamResponse):
            match done:
                case AskPrefill() | AskDecode():
                    done = await self._ask(request, job, route, done)
                case Refuse():
                    return refused(done.reason, done.text, done.retry_after)
                case PassOn():
                    raise AssertionError("there is no answer to pass on")
        return done

    async def _ask(self, request: web.Request, job: Job, route: Route, ask: Question) -> Effect | web.StreamResponse:
        with self._waits.wait(ask.engine.url, self._clock() + ask.seconds) as wait:
            try:
                answer = await self._send(job, ask)
                try:
                    if answer.status != 200:
                        return await self._not_ok(route, answer)
                    if isinstance(ask, AskPrefill):
                        return route.prefilled(ticket_in(await read_all(answer)), self._clock())
                    if answer.content_type == "text/event-stream":
                        return await self._stream(request, answer, wait)
                    return passed_on(answer, await read_all(answer))
                finally:
                    answer.close()
            except UpstreamFailed as failed:
                return route.failed(failed.kind, self._clock())
        if wait.response is not None:
            return await self._end_stream(wait)
        if wait.ended_by == "drained":
            return refused(RefusalReason.ENGINE_UNAVAILABLE, "the router is shutting down", 1.0)
        return route.failed(wait.ended_by or "timeout", self._clock())

    async def _send(self, job: Job, ask: Question) -> aiohttp.ClientResponse:
        body = job.body
        if isinstance(ask, AskPrefill):
            body = {**body, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        elif ask.ticket is not None:
            body = {**body, "kv_transfer_params": ask.ticket}
        # Never "0.000": that the time is over is no fault of the client's header.
        seconds = f"{max(ask.seconds, 0.001):.3f}"
        headers = {"X-Request-ID": job.request_id, TIMEOUT_HEADER: seconds}
        encoded = msgspec.json.encode(body)
        return await self._upstream.request("POST", ask.engine.url + job.path, body=encoded, headers=headers)

    async def _not_ok(self, route: Route, answer: aiohttp.ClientResponse) -> Effect | web.StreamResponse:
        body = await read_all(answer)
        effect = route.replied(reply_of(answer, body), self._clock())
        return passed_on(answer, body) if isinstance(effect, PassOn) else effect

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse, wait: Wait) -> web.StreamResponse:
        """Raises UpstreamFailed only before the first event."""
        events = wait.events
        while not (ready := events.feed(chunk := await read_some(answer))):
            if not chunk:
                raise UpstreamFailed("malformed", f"{answer.url} ended its stream without an event")
        response = wait.response = web.StreamResponse(status=answer.status, headers=headers_of(answer))
        try:
            await response.prepare(request)
            await response.write(ready)
            while chunk := await read_some(answer):
                if ready := events.feed(chunk):
                    await response.write(ready)
            if not events.over:
                raise UpstreamFailed("disconnected", f"{answer.url} ended its stream without a last event")
            await response.write_eof()
        except UpstreamFailed:
            wait.ended_by = "broken"
            return await self._end_stream(wait)
        except ConnectionError:
            response[OUTCOME] = "client_gone"
        return response

    async def _end_stream(self, wait: Wait) -> web.StreamResponse:
        reason, text = {
            None: (RefusalReason.DEADLINE_EXCEEDED, "the request's time is over"),
            "drained": (RefusalReason.ENGINE_UNAVAILABLE, "the router is shutting down"),
            "broken": (RefusalReason.ENGINE_UNAVAILABLE, "the engine stopped in the middle of its answer"),
        }[wait.ended_by]
        response = wait.response
        assert response is not None
        last = b""
        if not wait.events.over:
            response[OUTCOME] = "stream_broken" if wait.ended_by == "broken" else reason.value
            last = b"data: " + ApiError(reason.http_status, text, code=reason.value).body() + b"\n\n"
        with anyio.move_on_after(LAST_WORDS_SECONDS):
            try:
                await response.write_eof(last)
            except ConnectionError:
                response[OUTCOME] = "client_gone"
        return response


def ticket_in(body: bytes) -> Any:
    """`kv_transfer_params` of a prefill engine's answer; None when there is none. Its content is not the router's."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamFailed("malformed", f"the prefill engine's answer is no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise UpstreamFailed("malformed", "the prefill engine's answer is no JSON object")
    return answer.get("kv_transfer_params")


def headers_of(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in PASSED_HEADERS if name in answer.headers}


def passed_on(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    return web.Response(status=answer.status, body=body, headers=headers_of(answer))


def refused(reason: RefusalReason, text: str, retry_after: float | None) -> web.Response:
    response = error_response(of_refusal(RequestRefused(reason, text, retry_after=retry_after)))
    if retry_after is not None:
        response.headers.setdefault("Retry-After", str(max(1, round(retry_after))))
    response[OUTCOME] = reason.value
    return response


def outcome_of(status: int) -> str:
    if status < 400:
        return "completed"
    return {429: RefusalReason.QUEUE_FULL.value, 504: RefusalReason.DEADLINE_EXCEEDED.value}.get(
        status, "refused" if status < 500 else "failed"
    )
