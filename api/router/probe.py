"""Asks every engine for its health, and hands what it says, or its silence, to the fleet.

An engine opens its port when its weights are loaded. Until it has answered for the first time it is waited for, which
is no trouble before LOADING_SECONDS have passed; whatever it then answers, or that it falls silent again, is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import msgspec

from api.router.fleet import Fleet
from api.router.report import EngineReport
from api.router.upstream import Upstream, UpstreamFailed
from api.router.waits import Waits

log = logging.getLogger(__name__)

TIMEOUT_INTERVALS = 5  # an engine that is only busy answers within this many probe intervals
AWAITED_SECONDS = 0.1  # between two probes of an engine that has never answered
LOADING_SECONDS = 60.0  # from the router's start


class Prober:
    """`changed()` wakes after every probe, for whoever waits for an engine to come or go."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, waits: Waits, interval: float, clock: Callable[[], float]
    ) -> None:
        self._fleet, self._upstream, self._waits = fleet, upstream, waits
        self._interval, self._clock = interval, clock
        self._probed = anyio.Event()
        self._started = clock()
        self._answered: dict[str, bool] = {}  # URL of every engine that was probed → it has answered, some time
        self._logged: dict[str, tuple[bool, str]] = {}  # URL → what the log said of it last

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for engine in self._fleet.engines:
                tasks.start_soon(self._watch, engine.url)

    async def changed(self) -> None:
        await self._probed.wait()

    async def _watch(self, url: str) -> None:
        while True:
            await self.probe(url)
            self._probed.set()
            self._probed = anyio.Event()
            # A port that nobody listens on answers at once, so the first answer may be looked out for.
            awaited = self._is_loading() and not self._answered.get(url)
            await anyio.sleep(min(self._interval, AWAITED_SECONDS) if awaited else self._interval)

    def _is_loading(self) -> bool:
        return self._clock() - self._started < LOADING_SECONDS

    def _log_changes(self) -> None:
        """One line for each engine that is waited for, comes, goes, or loses its partners."""
        is_loading = self._is_loading()
        for engine in self._fleet.listing():
            if engine.url not in self._answered:
                continue
            is_awaited = is_loading and not self._answered[engine.url]
            state = (False, "awaited") if is_awaited else (engine.healthy, engine.reason)
            if self._logged.get(engine.url) == state:
                continue
            self._logged[engine.url] = state
            if is_awaited:
                log.info("waiting for engine url=%s", engine.url)
            else:
                level = logging.INFO if engine.healthy and not engine.reason else logging.WARNING
                name, healthy, reason = engine.engine_id, engine.healthy, engine.reason or "-"
                log.log(level, "engine engine_id=%s healthy=%s reason=%s", name, healthy, reason)

    async def probe(self, url: str) -> None:
        await self._ask(url)
        self._log_changes()

    async def _ask(self, url: str) -> None:
        timeout = TIMEOUT_INTERVALS * self._interval
        silence = f"no answer to a probe within {timeout:g} s"
        with anyio.move_on_after(timeout):
            try:
                status, body = await self._upstream.get(url + "/debug/engine")
                self._answered[url] = True
                report = msgspec.json.decode(body, type=EngineReport) if status == 200 else None
            except UpstreamFailed as failed:
                silence = str(failed)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                silence = f"{url}/debug/engine is not understood: {error}"
            else:
                if report is not None:
                    self._fleet.probed(url, report, self._clock())
                    return
                silence = f"{url}/debug/engine answered {status}" + (": wrong API key" if status == 401 else "")
        self._answered.setdefault(url, False)
        if self._fleet.silent(url, silence):
            self._waits.lost(url)
