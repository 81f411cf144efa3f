"""`python -m tools.bench.idle`: what each process of a deployment costs while nobody asks for anything."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.bench.processes import cpu_seconds, descendants, running

SETTLE_S = 3.0


@click.command()
@click.option("--seconds", default=30.0, show_default=True)
def main(seconds: float) -> None:
    """CPU time of every process of `kvyard up`, in percent of a core."""
    with running("up") as (_, process):
        time.sleep(SETTLE_S)
        before = {pid: cpu_seconds(pid) for pid in descendants(process.pid)}
        time.sleep(seconds)
        table = Table(title=f"idle over {seconds:g} s")
        for column in ("process", "% of a core", "resident MB"):
            table.add_column(column, justify="left" if column == "process" else "right")
        for pid, used in before.items():
            share = (cpu_seconds(pid) - used) / seconds * 100
            table.add_row(_name(pid), f"{share:.2f}", f"{_resident_megabytes(pid):.0f}")
    Console().print(table)


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "actors.worker" in words:
        return "worker"
    role = next((word.removeprefix("--role=") for word in words if word.startswith("--role=")), "")
    return " ".join(word for word in (*(w for w in words if w in ("up", "serve", "router")), role) if word)


def _resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
