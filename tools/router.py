"""`kvyard router`: one address in front of prefill and decode engines.

Exit codes: 0 after a drain, 1 when it cannot start here (port in use, no decode engine), 2 for a wrong flag.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from actors.configuration import RouterConfiguration
from tools.flags import configuration_from, options_of


@click.command()
@options_of(RouterConfiguration)
def router(**values: Any) -> None:
    """Pair prefill with decode engines behind one address.

    Give the URL of each engine: kvyard router --prefill http://10.0.0.1:8001 --decode http://10.0.0.2:8001
    """
    configuration = configuration_from(RouterConfiguration, values)

    from actors.kernel.process import die_with_parent
    from actors.kernel.run import run
    from actors.messages.errors import ConfigurationError
    from api.router.process import run_router

    die_with_parent()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)

    def started(port: int) -> None:
        click.echo(f"kvyard router: http://{configuration.host}:{port}/v1", err=True)

    try:
        run(run_router, configuration, started)
    except ConfigurationError as error:
        click.echo(f"kvyard router: {error}", err=True)
        sys.exit(1)
