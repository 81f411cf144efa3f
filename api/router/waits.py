"""The router's open waits for engines, so that one who knows better can end them.

A wait ends with its answer, at its deadline, when the probes say that its engine is lost (only before the first byte
has come: then another engine can still serve), or when the router has no more time to drain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import anyio
from aiohttp import web

from api.router.events import WholeEvents


class Wait:
    """`with` it: the body is cut short, and the error swallowed, when the wait ends before it."""

    def __init__(self, waits: Waits, url: str, deadline: float) -> None:
        self.url = url
        self.response: web.StreamResponse | None = None  # from the first byte on its way to the client on
        self.events = WholeEvents()  # of its stream
        self.ended_by: str | None = None  # "lost" | "drained" | "broken"; None while it runs, or at its deadline
        self._waits = waits
        self._scope = anyio.CancelScope(deadline=deadline)

    def end(self, why: str) -> None:
        self.ended_by = why
        self._scope.cancel()

    def __enter__(self) -> Wait:
        self._waits.open.append(self)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._waits.open.remove(self)
        return bool(self._scope.__exit__(kind, error, trace))


class Waits:
    def __init__(self) -> None:
        self.open: list[Wait] = []
        self._requests = 0
        self._idle = anyio.Event()

    def wait(self, url: str, deadline: float) -> Wait:
        """For an answer of the engine at `url`, to a deadline on the event loop's clock."""
        return Wait(self, url, deadline)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around everything that is done for one client's request."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()
                self._idle = anyio.Event()

    async def idle(self) -> None:
        """Returns when no request is under way."""
        while self._requests:
            await self._idle.wait()

    def lost(self, url: str) -> None:
        for wait in self.open:
            if wait.url == url and wait.response is None:
                wait.end("lost")

    def drained(self) -> None:
        for wait in self.open:
            wait.end("drained")
