"""`kvyard fetch-model`: put a model into the cache before it is needed, and say where."""

from __future__ import annotations

import click

from actors.configuration import EngineConfiguration
from actors.messages.errors import ConfigurationError
from runner.store.store import resolve


@click.command("fetch-model")
@click.argument("model", default=EngineConfiguration().model)
def fetch_model(model: str) -> None:
    """Fetch and convert MODEL, if that has not been done yet, and print the folder of its description.

    MODEL is an id that the model store knows, a .gguf file, or a Hugging Face folder.
    """
    try:
        description = resolve(model, progress=lambda line: click.echo(line, err=True))
    except ConfigurationError as error:
        click.echo(f"kvyard fetch-model: {error}", err=True)
        raise SystemExit(1) from error
    click.echo(description.folder)


if __name__ == "__main__":
    fetch_model()
