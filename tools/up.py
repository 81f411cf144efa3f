"""`kvyard up`: a whole deployment on this machine, until Ctrl-C or SIGTERM.

Exit codes: 0 after a drain; 1 when it cannot start here (port in use, no model); 2 for a wrong flag; else that of the
member that could not start. stdout gets one line, when the deployment is ready; everything else goes to stderr.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from actors.configuration import EngineConfiguration, UpConfiguration
from tools.deployment.plan import DECIDED
from tools.flags import configuration_from, options_of


@click.command()
@options_of(UpConfiguration)
@options_of(EngineConfiguration, skip=DECIDED)
def up(**values: Any) -> None:
    """Start prefill engines, decode engines and the router on this machine.

    With --prefill 0 each engine does everything. The flags below --port are the engines' own.
    """
    configuration = configuration_from(UpConfiguration, values)
    engine = configuration_from(
        EngineConfiguration, {name: value for name, value in values.items() if name not in DECIDED}
    )

    from actors.kernel.run import run
    from actors.messages.errors import ConfigurationError
    from tools.deployment.process import run_deployment

    try:
        sys.exit(run(run_deployment, configuration, engine))
    except ConfigurationError as error:
        click.echo(f"kvyard up: {error}", err=True)
        sys.exit(1)
