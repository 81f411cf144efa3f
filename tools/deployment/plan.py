"""What a deployment on one machine consists of: names, ports, command lines. Pure.

A member keeps its name and port for as long as `up` runs; only its epoch rises with each restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from actors.configuration import EngineConfiguration, Role, RouterConfiguration, UpConfiguration
from tools.flags import arguments_of

# What `up` decides itself for each engine, so neither a flag of `up` nor passed on from one.
DECIDED = frozenset({"role", "host", "port", "engine_id", "epoch", "kv_secret_file", "kv_host"})
TICKET_ROOM = 64 << 10  # bytes that the router may add to a client's body
# -P: a folder named `tools` where the user stands must not be taken for ours.
KVYARD = (sys.executable, "-P", "-m", "tools.cli")
ENGINE_HOST = "127.0.0.1"


class Member(msgspec.Struct, frozen=True):
    """One process tree of the deployment."""

    name: str  # the engine id, or "router"
    command: tuple[str, ...]
    url: str
    environment: dict[str, str] = {}
    has_epoch: bool = True

    def arguments(self, epoch: int) -> list[str]:
        return [*self.command, f"--epoch={epoch}"] if self.has_epoch else list(self.command)


class Deployment(msgspec.Struct, frozen=True):
    engines: tuple[Member, ...]
    router: Member


def engine_roles(up: UpConfiguration) -> list[tuple[str, Role]]:
    """(engine id, role) of every engine; without prefill engines the others do everything."""
    alone: Role = "decode" if up.prefill else "both"
    found: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(up.prefill)]
    return found + [(f"{alone}-{i}", alone) for i in range(up.decode)]


def threads_share(threads: int, cores: int, engines: int) -> int:
    """Threads of one engine's forward pass: as given, or a fair share of this machine's cores."""
    return threads or max(1, cores // engines)


def deployment_of(
    up: UpConfiguration,
    engine: EngineConfiguration,
    *,
    engine_ports: Sequence[int],
    secret_file: str,
    cores: int,
    command: Sequence[str] = KVYARD,
) -> Deployment:
    """One port for each of `engine_roles(up)`. `command` is what starts this program's tools."""
    roles = engine_roles(up)
    threads = threads_share(engine.threads, cores, len(roles))
    environment = {"PYTHONUNBUFFERED": "1"}
    if engine.api_key is not None:
        # Not on the command line, where every user of the machine could read it.
        environment["KVYARD_API_KEY"] = engine.api_key
    engines = tuple(
        Member(
            name=name,
            command=(
                *command,
                "serve",
                *arguments_of(
                    msgspec.structs.replace(
                        engine,
                        role=role,
                        host=ENGINE_HOST,
                        port=port,
                        engine_id=name,
                        kv_secret_file=secret_file,
                        threads=threads,
                        max_body_bytes=engine.max_body_bytes + TICKET_ROOM,
                        step_log=engine.step_log and os.path.join(engine.step_log, f"{name}.steplog"),
                    ),
                    skip={"api_key", "epoch"},
                ),
            ),
            url=f"http://{ENGINE_HOST}:{port}",
            environment={**environment, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)},
        )
        for (name, role), port in zip(roles, engine_ports, strict=True)
    )
    return Deployment(engines, _router(up, engine, engines, command, environment))


def _router(
    up: UpConfiguration,
    engine: EngineConfiguration,
    engines: Sequence[Member],
    command: Sequence[str],
    environment: Mapping[str, str],
) -> Member:
    configuration = RouterConfiguration(
        prefill=tuple(member.url for member in engines[: up.prefill]),
        decode=tuple(member.url for member in engines[up.prefill :]),
        host=up.host,
        port=up.port,
        max_body_bytes=engine.max_body_bytes,
        request_timeout=engine.request_timeout,
        drain_timeout=engine.drain_timeout,
    )
    return Member(
        name="router",
        command=(*command, "router", *arguments_of(configuration)),
        url=f"http://{reachable(up.host)}:{up.port}",
        environment=dict(environment),
        has_epoch=False,
    )


def reachable(host: str) -> str:
    """Where a client on this machine finds a listener on `host`."""
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"[{local}]" if ":" in local and not local.startswith("[") else local
