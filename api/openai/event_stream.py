"""Server-sent events, as OpenAI sends them. The headers go out with the first event, not before: until then an error
can still be an HTTP status."""

from __future__ import annotations

import msgspec
from aiohttp import web

from api.errors import ApiError

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._encode = msgspec.json.Encoder().encode
        self._ending = False
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, *objects: msgspec.Struct) -> None:
        """One event each, in one write. Raises ConnectionError when the client is gone."""
        if not self.started:
            await self.response.prepare(self._request)
        if objects:
            await self.response.write(b"".join(b"data: " + self._encode(item) + b"\n\n" for item in objects))

    async def done(self) -> None:
        await self._end(b"data: [DONE]\n\n")

    async def fail(self, error: ApiError) -> None:
        """The error as the last event; no [DONE] follows. Never waits: a client that has not taken what came before
        is cut off without it."""
        # Not found out by trying: in aiohttp a wait for the client that was cancelled, as by a deadline, makes the next
        # one raise CancelledError.
        if self._ending or self._request.protocol.writing_paused:
            abort_connection(self._request)
        else:
            await self._end(b"data: " + error.body() + b"\n\n")

    async def _end(self, event: bytes) -> None:
        self._ending = True
        await self.response.write(event)
        await self.response.write_eof()


def abort_connection(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
