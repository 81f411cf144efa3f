"""The engine process: the HTTP endpoint over the actors of one engine.

One failure domain: when an actor raises or the worker dies, every request gets its typed error and the process ends
with 70.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

import anyio

from actors.configuration import EngineConfiguration
from actors.engine import ANSWERS_END_S, EngineActors, context_limit, kv_capacity
from actors.health import Watchdog
from actors.kernel.life import first_error
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError, KvyardError
from actors.messages.model import ModelDescription
from actors.worker_settings import EXIT_FAILED
from api.engine import Engine

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)


async def run_engine(configuration: EngineConfiguration, description: ModelDescription, kv_secret: bytes | None) -> int:
    """Serves until SIGTERM or SIGINT (drains, returns 0) or a failure (returns 70). Raises ConfigurationError."""
    try:
        return await _run_engine(configuration, description, kv_secret)
    except BaseExceptionGroup as group:
        # A port in use or a worker that cannot start ends the body of a task group, which wraps what the body raised.
        if refused := group.subgroup(ConfigurationError):
            raise first_error(refused) from None
        raise


async def _run_engine(
    configuration: EngineConfiguration, description: ModelDescription, kv_secret: bytes | None
) -> int:
    capacity = kv_capacity(configuration, description)
    watchdog = Watchdog(int(capacity * configuration.max_quarantined_share))
    told_to_end, starting = anyio.Event(), anyio.CancelScope()
    actors: EngineActors | None = None
    failure: str | None = None
    app: web.Application | None = None
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks, ActorSystem() as system:
            max_model_len = context_limit(configuration, description)
            engine = Engine(configuration, description, max_model_len, capacity, kv_secret, watchdog, system.health)
            tasks.start_soon(_hear, signals, told_to_end, starting)

            def make_endpoint() -> None:
                # Half a second of imports and the tokenizer, while the worker loads the weights.
                nonlocal app
                from api.openai.app import make_app

                app = make_app(engine)

            with starting:
                actors = await EngineActors.start(
                    configuration, description, system, tasks, engine.metrics, watchdog, make_endpoint
                )
            if actors is None or app is None:
                tasks.cancel_scope.cancel()
                return 0
            try:
                engine.admission, engine.transport = actors.admission, actors.transport
                engine.worker_pids = [actors.worker.pid]
                from api.serving import serve

                runner, port = await serve(app, configuration.host, configuration.port, shutdown_timeout=ANSWERS_END_S)
                engine.ready = True
                log.info("engine_ready %s port=%d transport=%s", _identity(configuration), port, actors.transport)
                failure = await _until_end(told_to_end, actors)
                engine.ready = False
                if failure is None:
                    await _drain(actors, configuration)
                else:
                    log.error("engine_failed %s reason=%s", _identity(configuration), failure)
                await actors.stop()
                await runner.cleanup()
            finally:
                await actors.stop()
                tasks.cancel_scope.cancel()
    return 0 if failure is None else EXIT_FAILED


async def _hear(signals: AsyncIterable[signal.Signals], told_to_end: anyio.Event, starting: anyio.CancelScope) -> None:
    """A signal while the weights are loaded ends that too."""
    async for _ in signals:
        told_to_end.set()
        starting.cancel()


async def _until_end(told_to_end: anyio.Event, actors: EngineActors) -> str | None:
    """What ended the engine: None for a signal, else the failure in words."""
    failure: str | None = None
    async with anyio.create_task_group() as waiting:

        async def on_signal() -> None:
            await told_to_end.wait()
            waiting.cancel_scope.cancel()

        async def on_failure() -> None:
            nonlocal failure
            failure = await actors.until_failure()
            waiting.cancel_scope.cancel()

        waiting.start_soon(on_signal)
        waiting.start_soon(on_failure)
    return failure


async def _drain(actors: EngineActors, configuration: EngineConfiguration) -> None:
    try:
        await actors.drain(configuration.drain_timeout)
    except KvyardError as error:
        log.warning("drain_incomplete %s reason=%s", _identity(configuration), error)


def _identity(configuration: EngineConfiguration) -> str:
    return f"engine_id={configuration.engine_id} role={configuration.role} epoch={configuration.epoch}"
