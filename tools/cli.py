"""The script `kvyard`: a name for each tool, and nothing of a tool until it is called.

A command's module is imported when the command runs, never to list it: `kvyard steps` starts within 0.3 s because
neither torch nor aiohttp nor transformers comes in on the way.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import NamedTuple

import click

PARENT_PID = "KVYARD_PARENT_PID"  # set by actors.kernel.process, which is too heavy to import for its name alone


class Entry(NamedTuple):
    target: str  # "module:function"
    summary: str


COMMANDS = {
    "up": Entry("tools.up:up", "Start prefill engines, decode engines and the router on this machine."),
    "serve": Entry("tools.serve:serve", "Serve one engine: prefill, decode or both."),
    "router": Entry("tools.router:router", "Pair prefill with decode engines behind one address."),
    "load": Entry("tools.load.command:load", "Measure a server with random prompts in a closed loop."),
    "steps": Entry("tools.steps:steps", "Show what the scheduler did, step by step: in a scenario, or in a step log."),
    "replay": Entry("tools.replay:replay", "Run the scheduler over a step log again; demand the same plans."),
    "fetch-model": Entry("tools.fetch_model:fetch_model", "Put a model into the local store."),
}


class LazyGroup(click.Group):
    """A group whose commands are known by name before their modules are."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, function = entry.target.partition(":")
        command = getattr(import_module(module), function)
        assert isinstance(command, click.Command), f"{entry.target} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvyard", prog_name="kvyard")
def main() -> None:
    """Serve language models with prefill and decode on separate engines."""
    if PARENT_PID in os.environ:
        from actors.kernel.process import die_with_parent

        die_with_parent()


if __name__ == "__main__":
    main(prog_name="kvyard")
