"""The engine process: the HTTP endpoint, the AdmissionActor and the SchedulerActor, and the worker process below it.

One failure domain: when an actor raises or the worker dies, every request gets its typed error and the process ends
with 70. This module owns the composition and nothing else; each part is handed what it needs.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time

import anyio
from anyio.abc import TaskGroup

from actors.admission import AdmissionActor, AdmissionLimits
from actors.configuration import EngineConfiguration, SchedulerConfiguration
from actors.health import Watchdog
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError, KvyardError
from actors.messages.model import ModelDescription
from actors.messages.supervision import Drain
from actors.scheduler import SchedulerActor
from actors.scheduling.core import SchedulerCore
from actors.worker_process import WorkerProcess
from actors.worker_settings import EXIT_FAILED, WorkerSettings
from api.engine import Engine
from api.openai.app import make_app
from api.serving import serve

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY = 1 << 30
ANSWERS_END_S = 2.0  # for handlers to write their last event when the engine ends


async def run_engine(configuration: EngineConfiguration, description: ModelDescription, kv_secret: bytes | None) -> int:
    """Serves until SIGTERM or SIGINT (drains, returns 0) or a failure (returns 70). Raises ConfigurationError."""
    max_model_len = context_limit(configuration, description)
    capacity = kv_capacity(configuration, description, max_model_len)
    watchdog = Watchdog(int(capacity * configuration.max_quarantined_share))
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks, ActorSystem() as system:
            engine = Engine(configuration, description, max_model_len, kv_secret, watchdog, system.health)
            scheduler = SchedulerActor(
                SchedulerCore(scheduler_configuration(configuration, capacity, max_model_len)),
                clock=time.monotonic,
                observer=engine.metrics,
                watchdog=watchdog,
                recompute_failed_loads=configuration.kv_load_failure_policy == "recompute",
            )
            settings = worker_settings(configuration, description, capacity)
            environment = {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
            worker = await WorkerProcess.start(settings, system, tasks, scheduler.address, environment)
            try:
                admission = AdmissionActor(
                    AdmissionLimits(
                        max_model_len=max_model_len,
                        block_size=configuration.block_size,
                        capacity_blocks=capacity,
                        max_waiting_requests=configuration.max_waiting_requests,
                        max_waiting_tokens=configuration.max_waiting_tokens,
                    ),
                    scheduler.address,
                    worker.transfer,
                    time.monotonic,
                )
                scheduler.connect(admission.address, worker.executor, worker.transfer)
                engine.admission = await system.start(admission)
                await system.start(scheduler)
                ready = await worker.ready()
                system.watch(worker.executor)
                system.watch(worker.transfer)
                engine.worker_pids, engine.transport = [worker.pid], ready.transport
                runner, port = await serve(
                    make_app(engine), configuration.host, configuration.port, shutdown_timeout=ANSWERS_END_S
                )
                engine.ready = True
                log.info(
                    "engine_ready engine_id=%s role=%s url=http://%s:%d transport=%s kv_blocks=%d",
                    engine.engine_id,
                    configuration.role,
                    configuration.host,
                    port,
                    ready.transport,
                    capacity,
                )
                failure = await _until_end(signals, system, worker)
                engine.ready = False
                if failure is None:
                    await _drain(engine, configuration.drain_timeout)
                else:
                    log.error("engine_failed engine_id=%s reason=%s", engine.engine_id, failure)
                # Its `stopped` ends the streams that are left, each with its typed error.
                await system.stop(admission.address, ANSWERS_END_S)
                await runner.cleanup()
            finally:
                with anyio.CancelScope(shield=True):
                    await worker.stop()
                tasks.cancel_scope.cancel()
    return 0 if failure is None else EXIT_FAILED


def context_limit(configuration: EngineConfiguration, description: ModelDescription) -> int:
    """Tokens. Raises ConfigurationError when more is asked than the model was made for."""
    if configuration.max_model_len > description.context_length:
        raise ConfigurationError(
            f"--max-model-len {configuration.max_model_len} is more than the model's context of "
            f"{description.context_length} tokens"
        )
    return configuration.max_model_len or description.context_length


def kv_capacity(configuration: EngineConfiguration, description: ModelDescription, max_model_len: int) -> int:
    """Usable blocks of the KV pool; the null block comes on top."""
    block_bytes = description.kv_layout(configuration.dtype, configuration.block_size).block_bytes
    if configuration.kv_memory is None:
        return max(DEFAULT_KV_MEMORY // block_bytes, math.ceil(max_model_len / configuration.block_size))
    blocks = configuration.kv_memory // block_bytes
    if blocks < 1:
        raise ConfigurationError(
            f"--kv-memory {configuration.kv_memory} holds no KV block: one block of {configuration.block_size} tokens "
            f"has {block_bytes} bytes"
        )
    return blocks


def scheduler_configuration(
    configuration: EngineConfiguration, capacity: int, max_model_len: int
) -> SchedulerConfiguration:
    return SchedulerConfiguration(
        usable_blocks=capacity,
        block_size=configuration.block_size,
        max_num_seqs=configuration.max_num_seqs,
        max_num_batched_tokens=configuration.max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=configuration.policy,
        prefix_caching=configuration.prefix_caching,
        long_prefill_token_threshold=configuration.long_prefill_token_threshold,
        reserve_full_sequence=configuration.reserve_full_sequence,
        watermark=configuration.watermark,
        kv_load_failure_policy=configuration.kv_load_failure_policy,
        kv_connector=True,
        load_timeout_s=configuration.kv_load_timeout,
        fence_frees=True,
    )


def worker_settings(configuration: EngineConfiguration, description: ModelDescription, capacity: int) -> WorkerSettings:
    assert configuration.engine_id is not None
    return WorkerSettings(
        description=description,
        engine_id=configuration.engine_id,
        epoch=configuration.epoch,
        device=configuration.device,
        dtype=configuration.dtype,
        num_blocks=capacity + 1,
        block_size=configuration.block_size,
        threads=configuration.threads or len(os.sched_getaffinity(0)),
        kv_host=configuration.kv_host or configuration.host,
        transport=configuration.transport,
        lease_s=configuration.lease,
        renewal_s=configuration.lease_renewal,
        fault=configuration.fault,
    )


async def _until_end(signals: object, system: ActorSystem, worker: WorkerProcess) -> str | None:
    """What ended the engine: None for a signal, else the failure in words."""
    outcome: list[str | None] = []

    async with anyio.create_task_group() as waiting:

        async def on_signal() -> None:
            async for _ in signals:  # type: ignore[attr-defined]
                _end(waiting, outcome, None)
                return

        async def on_failure() -> None:
            await system.wait_failed()
            _end(waiting, outcome, f"{type(system.failure).__name__}: {system.failure}")

        async def on_worker_exit() -> None:
            code = await worker.child.wait()
            _end(waiting, outcome, f"the worker process ended with code {code}")

        for wait in (on_signal, on_failure, on_worker_exit):
            waiting.start_soon(wait)
    return outcome[0]


def _end(waiting: TaskGroup, outcome: list[str | None], what: str | None) -> None:
    outcome.append(what)
    waiting.cancel_scope.cancel()


async def _drain(engine: Engine, seconds: float) -> None:
    try:
        await engine.admission.ask(Drain(seconds), seconds)
    except KvyardError as error:
        log.warning("drain_incomplete engine_id=%s reason=%s", engine.engine_id, error)
