"""`kvyard serve`: one engine. Reads the flags, fetches the model, runs the engine process until it ends.

Exit codes: 0 after a drain, 1 when it cannot start (port, cache, weights), 2 for a wrong flag, 70 when an actor or the
worker died.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from functools import partial
from typing import Any

import click
import msgspec

from actors.configuration import EngineConfiguration
from tools.flags import WrongFlag, configuration_from, options_of


@click.command()
@options_of(EngineConfiguration)
def serve(**values: Any) -> None:
    """Serve one engine: prefill, decode or both."""
    from actors.kernel.process import die_with_parent
    from actors.kernel.run import run
    from actors.messages.errors import ConfigurationError
    from api.engine_process import run_engine
    from runner.store.store import resolve
    from tools.deployment.addresses import check_free

    die_with_parent()
    configuration = identified(configuration_from(EngineConfiguration, values))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        secret = deployment_secret(configuration)
        check_free(configuration.host, configuration.port)  # now, not when the model is loaded
        description = resolve(configuration.model, progress=partial(click.echo, err=True))
        sys.exit(run(partial(run_engine, configuration, description, secret)))
    except ConfigurationError as error:
        click.echo(f"kvyard serve: {error}", err=True)
        sys.exit(1)


def identified(configuration: EngineConfiguration) -> EngineConfiguration:
    """With an engine id and an epoch: those given, else made from role, port, clock."""
    return msgspec.structs.replace(
        configuration,
        engine_id=configuration.engine_id or f"{configuration.role}-{configuration.port}-{secrets.token_hex(3)}",
        epoch=configuration.epoch or time.time_ns() // 1_000_000,
    )


def deployment_secret(configuration: EngineConfiguration) -> bytes | None:
    """The bytes of --kv-secret-file. Raises ConfigurationError; WrongFlag where a role cannot do without."""
    from connectors.ticket import load_secret

    if configuration.role != "both" and configuration.device != "cpu":
        raise WrongFlag(
            f"--role {configuration.role} hands KV blocks over, which is built for host memory only: "
            f"with --device {configuration.device} serve with --role both"
        )
    if configuration.role != "both" and (configuration.kv_host or configuration.host) in ("", "0.0.0.0", "::"):
        raise WrongFlag(
            f"--host {configuration.host} is no address at which another engine finds this one: "
            "give that address as --kv-host"
        )
    if configuration.kv_secret_file is not None:
        return load_secret(configuration.kv_secret_file)
    if configuration.role != "both":
        raise WrongFlag(
            f"--role {configuration.role} hands KV blocks over and needs --kv-secret-file: "
            "make one with `openssl rand -hex 32` and give the same file to all engines"
        )
    return None
