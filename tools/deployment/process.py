"""The process of `kvyard up`: everything of the outside world that the supervisor is handed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import anyio
import click
import msgspec

from actors.configuration import EngineConfiguration, UpConfiguration
from actors.kernel.process import spawn
from actors.messages.errors import ConfigurationError
from runner.store.store import is_in_place
from tools.deployment.addresses import check_free, free_ports
from tools.deployment.inquiry import ANSWER_S, Inquiry
from tools.deployment.plan import ENGINE_HOST, KVYARD, deployment_of, engine_roles
from tools.deployment.supervisor import supervise

SECRET_BYTES = 32


async def run_deployment(up: UpConfiguration, engine: EngineConfiguration, command: Sequence[str] = KVYARD) -> int:
    """The exit code. `command` starts this program's tools. Raises ConfigurationError when nothing could be started."""
    check_free(up.host, up.port)
    if engine.step_log is not None:
        engine = msgspec.structs.replace(engine, step_log=folder_of_step_logs(engine.step_log))
    seed = secrets.randbits(64)
    if up.port == 0:
        up = msgspec.structs.replace(up, port=free_ports(1, up.host, seed)[0])
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        if not is_in_place(engine.model):
            code = await _fetch_model([*command, "fetch-model", "--", engine.model], signals)
            if code is not None:
                return code
        with secret_file() as path:
            deployment = deployment_of(
                up,
                engine,
                engine_ports=free_ports(len(engine_roles(up)), ENGINE_HOST, seed + 1),
                secret_file=path,
                cores=len(os.sched_getaffinity(0)),
                command=command,
            )
            engines = ", ".join(member.name for member in deployment.engines)
            _to_stderr(f"kvyard up: starting {engines} and the router; loading {engine.model}\n".encode())
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
                inquiry = Inquiry(session, engine.api_key)

                async def announce() -> None:
                    click.echo(await inquiry.ready_line(deployment))

                return await supervise(
                    deployment,
                    signals,
                    wait_ready=inquiry.wait_ready,
                    announce=announce,
                    log=_to_stderr,
                    clock=anyio.current_time,
                    drain_timeout=engine.drain_timeout,
                )


def folder_of_step_logs(folder: str) -> str:
    """Absolute; made if it does not exist. Raises ConfigurationError."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--step-log {path} cannot be a folder for the step logs: {error.strerror}") from None
    return str(path)


async def _fetch_model(argv: Sequence[str], signals: AsyncIterator[object]) -> int | None:
    """Once, before the engines would do it side by side. None: it is there; else the exit code of `up`."""
    exit_code: int | None = 0  # of `up`, when a signal comes first
    async with await spawn(argv, stdout=subprocess.DEVNULL) as fetching, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await anext(signals)
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        exit_code = await fetching.wait() or None
        tasks.cancel_scope.cancel()
    return exit_code


@contextmanager
def secret_file() -> Iterator[str]:
    """The path of a file with a new secret for the tickets, which only this user can read.

    It lies in memory and is reached through this process, so it is gone with it, also after SIGKILL.
    """
    descriptor = os.memfd_create("kvyard-secret")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secrets.token_hex(SECRET_BYTES).encode())
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _to_stderr(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
