"""Asks every engine for its health, and hands what it says, or its silence, to the fleet."""

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


class Prober:
    """`changed()` wakes after every probe, for whoever waits for an engine to come or go."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, waits: Waits, interval: float, clock: Callable[[], float]
    ) -> None:
        self._fleet, self._upstream, self._waits = fleet, upstream, waits
        self._interval, self._clock = interval, clock
        self._probed = anyio.Event()
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
            self._log_changes()
            self._probed.set()
            self._probed = anyio.Event()
            await anyio.sleep(self._interval)

    def _log_changes(self) -> None:
        """One line for each engine that comes, goes, or loses its partners."""
        for engine in self._fleet.listing():
            state = (engine.healthy, engine.reason)
            if self._logged.get(engine.url) != state:
                self._logged[engine.url] = state
                level = logging.INFO if engine.healthy and not engine.reason else logging.WARNING
                name, healthy, reason = engine.engine_id, engine.healthy, engine.reason or "-"
                log.log(level, "engine engine_id=%s healthy=%s reason=%s", name, healthy, reason)

    async def probe(self, url: str) -> None:
        timeout = TIMEOUT_INTERVALS * self._interval
        silence = f"no answer to a probe within {timeout:g} s"
        with anyio.move_on_after(timeout):
            try:
                status, body = await self._upstream.get(url + "/debug/engine")
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
        if self._fleet.silent(url, silence):
            self._waits.lost(url)
