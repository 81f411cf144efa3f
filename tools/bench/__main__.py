"""`python -m tools.bench` (`make bench`): every measurement of docs/benchmarks.md, one after the other."""

from __future__ import annotations

import subprocess
import sys

import click

PARTS = ("tables", "step_profile", "compile", "transfer", "step_log", "idle", "interference", "serving")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--rounds", type=click.IntRange(1), help="of the tables")
@click.option("--only", multiple=True, metavar="ROW", help="the tables alone, and of them this row; repeat")
@click.option("--markdown", type=click.Path(), help="file that the tables are written to as well")
def main(parts: tuple[str, ...], rounds: int | None, only: tuple[str, ...], markdown: str | None) -> None:
    """Run PARTS, or all of them; each prints its table.

    The tables of goals need PEER and PEERS for the rows against other engines. They take two to three hours, the other
    parts about twenty minutes, on two quiet cores.
    """
    given = {"--rounds": rounds, "--markdown": markdown}
    flags = [f"{name}={value}" for name, value in given.items() if value is not None] + [
        f"--only={row}" for row in only
    ]
    failed = []
    for part in ("tables",) if only else parts or PARTS:
        print(f"\n$ python -m tools.bench.{part}", flush=True)
        command = [sys.executable, "-P", "-m", f"tools.bench.{part}", *(flags if part == "tables" else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(part)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
