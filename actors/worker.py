"""The worker process of one rank: it owns the device, the weights and the KV pool; ExecutorActor and TransferActor.

Started by the engine process with its `WorkerSettings` as JSON in argv and one end of a socket pair. It says
`WorkerReady` when everything is there, and ends with the socket, with its parent, or with the first actor that fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from functools import partial

import anyio
import msgspec

from actors.executor import ExecutorActor
from actors.forward import SerialThread
from actors.kernel.link import Link
from actors.kernel.process import die_with_parent, inherited_socket
from actors.kernel.run import run
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError
from actors.messages.plan import StepFailed, StepPlan, StepResult
from actors.messages.supervision import WorkerReady
from actors.messages.transfer import TransferOrder, TransferReport
from actors.transfer import TransferActor
from actors.worker_settings import EXIT_CONFIGURATION, EXIT_FAILED, SCHEDULER_WINDOW, WorkerSettings
from connectors.memory import KVMemory
from runner.model_runner import ModelRunner

GIL_SWITCH_S = 0.0005  # the loop must get its turn between two tensor operations of the executor's thread


async def run_worker(settings: WorkerSettings) -> None:
    """Returns when the engine process closes the socket; raises what made an actor fail."""
    thread = SerialThread("forward")
    make_runner = partial(
        ModelRunner,
        settings.description,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        threads=settings.threads,
        weights=settings.weights,
    )
    loop = asyncio.get_running_loop()
    runner = await loop.run_in_executor(thread, make_runner)
    seconds_per_token = await loop.run_in_executor(thread, runner.warm_up)
    pool = runner.kv_pool
    memory = KVMemory.nothing(pool.block_bytes)
    if pool.is_in_host_memory:
        memory = KVMemory(pool.address, settings.num_blocks, pool.block_bytes, pool.memory())
    async with anyio.create_task_group() as tasks, ActorSystem() as system:
        link = Link(inherited_socket(), "the engine")
        results = link.address("scheduler", StepResult | StepFailed | TransferReport, type(None), SCHEDULER_WINDOW)
        startup = link.address("startup", WorkerReady, type(None), 1)
        executor = await system.start(ExecutorActor(runner, thread, results))
        transfer_actor = TransferActor(
            "transfer",
            memory=memory,
            layout=settings.description.kv_layout(settings.dtype, settings.block_size, settings.kv_dtype),
            engine_id=settings.engine_id,
            epoch=settings.epoch,
            host=settings.kv_host,
            transport=settings.transport if pool.is_in_host_memory else "tcp",
            lease_s=settings.lease_s,
            renewal_s=settings.renewal_s,
            reports=results,
            clock=time.monotonic,
            token_bytes=secrets.token_bytes,
            fault=settings.fault,
        )
        transfer = await system.start(transfer_actor)
        link.expose(executor, StepPlan, type(None))
        link.expose(transfer, TransferOrder, type(None))

        async def until_failure() -> None:
            await system.wait_failed()
            tasks.cancel_scope.cancel()

        tasks.start_soon(until_failure)
        await startup.tell(
            WorkerReady(os.getpid(), transfer_actor.control_port, transfer_actor.transport_name, seconds_per_token)
        )
        await link.run()
        tasks.cancel_scope.cancel()
    if system.failure is not None:
        raise system.failure


def main() -> None:
    die_with_parent()
    sys.setswitchinterval(GIL_SWITCH_S)
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    logging.basicConfig(format=f"%(asctime)s %(levelname)s worker of {settings.engine_id}: %(message)s")
    logging.getLogger("runner").setLevel(logging.INFO)  # what it found, built and loaded
    try:
        run(partial(run_worker, settings))
    except ConfigurationError as error:
        print(f"kvyard: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)
    except Exception:
        logging.exception("the worker ends")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
