"""`python -m tools.bench` (`make bench`): every measurement of docs/benchmarks.md, one after the other."""

from __future__ import annotations

import subprocess
import sys

import click

PARTS = ("step_profile", "transfer", "step_log", "idle", "interference", "serving", "peers")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
def main(parts: tuple[str, ...]) -> None:
    """Run PARTS, or all of them; each prints its table. About 15 minutes on two quiet cores."""
    for part in parts or PARTS:
        print(f"\n$ python -m tools.bench.{part}", flush=True)
        subprocess.run([sys.executable, "-P", "-m", f"tools.bench.{part}"], check=True)


if __name__ == "__main__":
    main()
