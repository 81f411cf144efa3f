"""`kvyard` lists its tools without importing one, and `kvyard steps` starts light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "aiohttp", "transformers", "asyncio", "uvloop", "tokenizers", "numpy", "rich"}


def loaded_by(*arguments: str) -> set[str]:
    code = (
        "import sys, tools.cli\n"
        f"try: tools.cli.main({list(arguments)!r}, prog_name='kvyard')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('MODULES', *sorted(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(result.stdout.rpartition("MODULES")[2].split())


def test_the_list_of_commands_imports_none_of_them() -> None:
    loaded = loaded_by("--help")
    assert not loaded & (HEAVY | {entry.target.partition(":")[0] for entry in COMMANDS.values()})


@pytest.mark.parametrize("name", ["steps", "replay"])
def test_steps_and_replay_start_light(name: str) -> None:
    loaded = loaded_by(name, "--help")
    assert f"tools.{name}" in loaded
    assert not loaded & {"torch", "aiohttp", "transformers"}


@pytest.mark.parametrize("name", ["up", "router", "load"])
def test_a_command_s_help_needs_no_torch_and_no_server(name: str) -> None:
    assert not loaded_by(name, "--help") & {"torch", "aiohttp", "transformers"}


def test_help_names_every_command_and_an_unknown_one_is_refused() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name, entry in COMMANDS.items():
        assert f"{name} {entry.summary}" in shown
    refused = CliRunner().invoke(main, ["serv"])
    assert refused.exit_code == 2
    assert "No such command 'serv'" in refused.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--role", "decode", "--device", "cuda"], "with --device cuda serve with --role both"),
        (["--role", "decode"], "needs --kv-secret-file: make one with `openssl rand -hex 32`"),
        (["--role", "prefill", "--host", "0.0.0.0"], "--host 0.0.0.0 is no address at which another engine finds this"),
    ],
)
def test_serve_says_what_a_role_cannot_do_without(flags: list[str], says: str) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "tools.cli", "serve", *flags], capture_output=True, text=True, cwd=ROOT
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert says in refused.stderr
