"""The actors of one engine, put together: admission and scheduler in this process, executor and transfer in the worker.

It owns the composition and what follows from configuration and model together (context, KV capacity); it knows no HTTP.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

import anyio
from anyio.abc import TaskGroup

from actors.admission import AdmissionActor, AdmissionLimits, AdmissionMessage
from actors.configuration import ROBUST_RULES, EngineConfiguration, SchedulerConfiguration
from actors.health import Watchdog
from actors.kernel.address import Address
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from actors.messages.supervision import Drain
from actors.observer import Observer
from actors.scheduler import SchedulerActor
from actors.scheduling.core import SchedulerCore
from actors.scheduling.recorded import RecordedCore
from actors.scheduling.records import Header
from actors.step_log.writer import NO_STEP_LOG, RecordSink, StepLog
from actors.worker_process import WorkerProcess
from actors.worker_settings import WorkerSettings

DEFAULT_KV_MEMORY = 1 << 30
ANSWERS_END_S = 2.0  # for the AdmissionActor to give every stream that is left its typed error


class EngineActors:
    """Made by `start`; whoever made it must `stop` it, whatever happened."""

    def __init__(
        self, system: ActorSystem, worker: WorkerProcess, admission: Address[AdmissionMessage], transport: str
    ) -> None:
        self.system, self.worker, self.admission, self.transport = system, worker, admission, transport

    @classmethod
    async def start(
        cls,
        configuration: EngineConfiguration,
        description: ModelDescription,
        system: ActorSystem,
        tasks: TaskGroup,
        observer: Observer,
        watchdog: Watchdog,
        meanwhile: Callable[[], None],
    ) -> EngineActors:
        """Returns when the worker has loaded the weights; `meanwhile` is called while it does.

        Raises ConfigurationError, or what `meanwhile` raises, with no worker left.
        """
        max_model_len = context_limit(configuration, description)
        capacity = kv_capacity(configuration, description)
        settings = worker_settings(configuration, description, capacity)
        core_configuration = scheduler_configuration(configuration, capacity, max_model_len)
        step_log = open_step_log(configuration, core_configuration, observer)
        core = SchedulerCore(core_configuration)
        if configuration.step_log is not None:
            core = RecordedCore(core_configuration, step_log.write)
        scheduler = SchedulerActor(
            core,
            clock=time.monotonic,
            observer=observer,
            watchdog=watchdog,
            recompute_failed_loads=configuration.kv_load_failure_policy == "recompute",
            depth=configuration.async_depth,
            step_log=step_log,
        )
        environment = {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        worker = await WorkerProcess.start(settings, system, tasks, scheduler.address, environment)
        try:
            limits = AdmissionLimits(
                max_model_len=max_model_len,
                block_size=configuration.block_size,
                capacity_blocks=capacity,
                max_waiting_requests=configuration.max_waiting_requests,
                max_waiting_tokens=configuration.max_waiting_tokens,
            )
            admission = AdmissionActor(limits, scheduler.address, worker.transfer, time.monotonic)
            scheduler.connect(admission.address, worker.executor, worker.transfer)
            await system.start(admission)
            await system.start(scheduler)
            meanwhile()
            ready = await worker.ready()
            watchdog.warmed_up(ready.seconds_per_token)
        except BaseException:
            step_log.close()
            with anyio.CancelScope(shield=True):
                await worker.stop()
            raise
        system.watch(worker.executor)
        system.watch(worker.transfer)
        return cls(system, worker, admission.address, ready.transport)

    async def until_failure(self) -> str:
        """What made the engine fail, in words: an actor that raised, or the end of the worker."""
        failure: list[str] = []

        async with anyio.create_task_group() as waiting:

            async def on_actor() -> None:
                await self.system.wait_failed()
                failure.append(f"{type(self.system.failure).__name__}: {self.system.failure}")
                waiting.cancel_scope.cancel()

            async def on_worker() -> None:
                code = await self.worker.child.wait()
                failure.append(f"the worker process ended with code {code}")
                waiting.cancel_scope.cancel()

            waiting.start_soon(on_actor)
            waiting.start_soon(on_worker)
        return failure[0]

    async def drain(self, seconds: float) -> None:
        """No newcomers; waits for the requests there are. Raises KvyardError when they take longer."""
        await self.admission.ask(Drain(seconds), seconds)

    async def stop(self) -> None:
        """Every stream that is left ends with its typed error; then the worker ends."""
        with anyio.CancelScope(shield=True):
            await self.system.stop(self.admission, ANSWERS_END_S)
            await self.worker.stop()


def context_limit(configuration: EngineConfiguration, description: ModelDescription) -> int:
    """Tokens. Raises ConfigurationError for more than the model was made for, or too few for any answer."""
    if configuration.max_model_len == 1:
        raise ConfigurationError("--max-model-len 1 holds no prompt with an answer: at least 2 tokens are needed")
    if configuration.max_model_len > description.context_length:
        raise ConfigurationError(
            f"--max-model-len {configuration.max_model_len} is more than the model's context of "
            f"{description.context_length} tokens"
        )
    return configuration.max_model_len or description.context_length


def kv_capacity(configuration: EngineConfiguration, description: ModelDescription) -> int:
    """Usable blocks of the KV pool; the null block comes on top. Raises ConfigurationError for less than one."""
    layout = description.kv_layout(configuration.dtype, configuration.block_size, configuration.kv_dtype)
    block_bytes = layout.block_bytes
    if configuration.kv_memory is None:
        one_context = math.ceil(context_limit(configuration, description) / configuration.block_size)
        return max(DEFAULT_KV_MEMORY // block_bytes, one_context)
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
        async_scheduling=configuration.async_depth > 1,
        reserve_full_sequence=configuration.reserve_full_sequence,
        watermark=configuration.watermark,
        kv_load_failure_policy=configuration.kv_load_failure_policy,
        kv_connector=True,
        load_timeout_s=configuration.kv_load_timeout,
        **ROBUST_RULES,
    )


def open_step_log(configuration: EngineConfiguration, core: SchedulerConfiguration, observer: Observer) -> RecordSink:
    """Raises ConfigurationError where --step-log cannot be written. The SchedulerActor closes it."""
    if configuration.step_log is None:
        return NO_STEP_LOG
    assert configuration.engine_id is not None
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    header = Header(
        engine_id=configuration.engine_id,
        epoch=configuration.epoch,
        role=configuration.role,
        configuration=core,
        async_depth=configuration.async_depth,
        kvyard_version=version("kvyard"),
        python_version=platform.python_version(),
        hash_seed="" if hash_seed == "random" else hash_seed,
        started_unix=time.time(),
        started=time.monotonic(),
    )
    return StepLog.open(configuration.step_log, header, observer.step_log_failed)


def worker_settings(configuration: EngineConfiguration, description: ModelDescription, capacity: int) -> WorkerSettings:
    assert configuration.engine_id is not None
    return WorkerSettings(
        description=description,
        engine_id=configuration.engine_id,
        epoch=configuration.epoch,
        device=configuration.device,
        dtype=configuration.dtype,
        kv_dtype=configuration.kv_dtype,
        num_blocks=capacity + 1,
        block_size=configuration.block_size,
        threads=configuration.threads or len(os.sched_getaffinity(0)),
        kv_host=configuration.kv_host or configuration.host,
        transport=configuration.transport,
        lease_s=configuration.lease,
        renewal_s=configuration.lease_renewal,
        weights=configuration.weights,
        fault=configuration.fault,
    )
