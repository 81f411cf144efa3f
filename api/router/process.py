"""The router process: puts the parts together, serves, and drains on SIGTERM or SIGINT.

Draining: no new connections, 503 for new requests on old ones, `/ready` says no; what runs may finish until the drain
timeout, then gets an error or an error event. A second signal ends the wait.
"""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import AsyncIterator, Callable

import anyio

from actors.configuration import RouterConfiguration
from actors.messages.errors import ConfigurationError
from api.router.admin import RouterAdmin
from api.router.app import RouterApp
from api.router.fleet import Fleet
from api.router.forward import Forwarder
from api.router.metrics import RouterMetrics
from api.router.probe import Prober
from api.router.upstream import Upstream
from api.router.waits import Waits
from api.serving import serve

logger = logging.getLogger(__name__)


async def run_router(configuration: RouterConfiguration, started: Callable[[int], None]) -> None:
    """Until a signal. `started` is called with the bound port. Raises ConfigurationError when it cannot start."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await serve_router(configuration, started, signals)


async def serve_router(
    configuration: RouterConfiguration, started: Callable[[int], None], stop: AsyncIterator[object]
) -> None:
    """Serves until `stop` gives an element; a second one ends the draining."""
    if not configuration.decode:
        raise ConfigurationError("no engine can decode: give at least one --decode URL")
    try:
        fleet = Fleet.of(configuration.prefill, configuration.decode)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    waits, clock = Waits(), anyio.current_time
    metrics = RouterMetrics(fleet, clock)
    async with Upstream.session() as session:
        upstream = Upstream(session, configuration.api_key)
        forwarder = Forwarder(fleet, upstream, waits, metrics, clock)
        admin = RouterAdmin(configuration, fleet, upstream, waits, clock)
        router = RouterApp(configuration, fleet, upstream, forwarder, admin, metrics, clock)
        application = router.application(lambda: secrets.token_hex(12))
        runner, port = await serve(application, configuration.host, configuration.port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Prober(fleet, upstream, waits, configuration.probe_interval, clock).run)
            started(port)
            await anext(stop)
            router.draining = True
            logger.info("draining timeout_s=%g", configuration.drain_timeout)
            for site in list(runner.sites):
                await site.stop()
            with anyio.move_on_after(configuration.drain_timeout):
                await _idle_or_told_again(waits, stop)
            waits.drained()
            await runner.cleanup()
            tasks.cancel_scope.cancel()


async def _idle_or_told_again(waits: Waits, stop: AsyncIterator[object]) -> None:
    async with anyio.create_task_group() as tasks:

        async def hurry() -> None:
            await anext(stop)
            tasks.cancel_scope.cancel()

        tasks.start_soon(hurry)
        await waits.idle()
        tasks.cancel_scope.cancel()
