"""`python -m tools.bench.tables`: the figures of the project beside what was agreed, and the same at other lengths.

Every row is measured in the same run as what stands beside it; what cannot be measured says why. Progress goes to
stderr row by row, with every round's figures, the tables to stdout: the markdown that docs/benchmarks.md has.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tools.bench.goals import AGREED_LOADS, AGREED_OWN, OTHER_LOADS
from tools.bench.peers import Load, Peers, compare
from tools.bench.rows import Measure, Measured, Row, cells, failed, markdown

NO_PEERS = "skipped: needs PEER and PEERS"
TABLES: dict[str, tuple[Mapping[Row, Load], Mapping[Row, Measure]]] = {
    "agreed": (AGREED_LOADS, AGREED_OWN),
    "other-lengths": (OTHER_LOADS, {}),
}
KEYS = [row.key for loads, own in TABLES.values() for row in (*loads, *own)]


def measured(
    loads: Mapping[Row, Load], own: Mapping[Row, Measure], rounds: int, peers: Peers | None
) -> Iterator[tuple[Row, Measured]]:
    """Row by row. A row that fails does not keep the others from being measured."""
    if peers is None:
        yield from ((row, Measured(missing=NO_PEERS)) for row in loads)
    else:
        yield from compare(peers, loads, rounds)
    for row, measure in own.items():
        try:
            yield row, measure(rounds)
        except Exception as error:
            yield row, failed(error)


def machine(cpuinfo: str) -> str:
    """Of the text of /proc/cpuinfo: what a figure depends on."""
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    flags = {
        flag for line in cpuinfo.splitlines() if line.startswith("flags") for flag in line.split(":", 1)[1].split()
    }
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX"}
    return f"{len(names)} × {names[0] if names else 'unknown'}, " + ", ".join(
        name if flag in flags else f"no {name}" for flag, name in known.items()
    )


@click.command()
@click.option("--peer", "installed", envvar="PEER", help="folder that setup.sh filled; also PEER")
@click.option("--peers", "scripts", envvar="PEERS", help="folder of setup.sh, serve.sh and load.sh; also PEERS")
@click.option("--table", "names", type=click.Choice(list(TABLES)), multiple=True, default=list(TABLES))
@click.option("--only", type=click.Choice(KEYS), multiple=True, metavar="ROW", help=f"of {', '.join(KEYS)}; repeat")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="of each figure, in turns")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="write the tables to this file as well")
def main(
    installed: str | None,
    scripts: str | None,
    names: Sequence[str],
    only: Sequence[str],
    rounds: int,
    path: Path | None,
) -> None:
    """Figures beside goals and floors; medians of alternating rounds. Both tables: two to three hours."""
    peers = Peers(installed, scripts) if installed and scripts else None
    if peers is None:
        click.echo(f"rows against other engines are {NO_PEERS}, see docs/benchmarks.md", err=True)
    tables: dict[str, dict[Row, Measured]] = {name: {} for name in names}
    for name, found in tables.items():
        loads, own = TABLES[name]
        if only:
            loads = {row: load for row, load in loads.items() if row.key in only}
            own = {row: measure for row, measure in own.items() if row.key in only}
        for row, figures in measured(loads, own, rounds, peers):
            found[row] = figures
            values = f"{' | '.join(cells(row, figures)[2:])}  {list(figures.ours)} {list(figures.theirs)}"
            click.echo(f"{row.key}: {figures.missing or values}", err=True)
            if path is not None:  # row by row: hours are not lost to whatever ends this
                path.write_text(text(tables, command(names, only, rounds)))
    click.echo(text(tables, command(names, only, rounds)))
    missed = [row.key for found in tables.values() for row, figures in found.items() if "failed" in figures.missing]
    if missed:
        sys.exit(f"failed: {', '.join(missed)}")


def text(tables: Mapping[str, dict[Row, Measured]], line: str) -> str:
    parts = [f"### {name.replace('-', ' ').capitalize()}\n\n{markdown(rows)}" for name, rows in tables.items() if rows]
    return "\n".join([*parts, f"Machine: {machine(Path('/proc/cpuinfo').read_text())}. `{line}`\n"])


def command(names: Sequence[str], only: Sequence[str], rounds: int) -> str:
    """What was run, without where this machine keeps things."""
    chosen = [f"--only={key}" for key in only] + [f"--table={name}" for name in names if len(names) < len(TABLES)]
    return shlex.join(["python", "-m", "tools.bench.tables", *chosen, f"--rounds={rounds}"])


if __name__ == "__main__":
    main()
