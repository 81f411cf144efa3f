"""`python -m tools.bench.peers`: kvyard against vLLM's CPU build and llama.cpp's server, with vLLM's own client.

Needs two folders: PEER, where the peers are installed, and PEERS, whose setup.sh installed them and whose serve.sh and
load.sh start and load them. Both servers of a comparison stand side by side and are loaded in turn.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tools.bench.processes import Server, free_port, running, server

THROUGHPUT, FIRST_TOKEN = "Output token throughput (tok/s)", "Median TTFT (ms)"
UNITS = {THROUGHPUT: "tokens/s", FIRST_TOKEN: "ms to the first token"}


class Work(msgspec.Struct, frozen=True):
    """One line of the table. `goal` and `floor` are ratios of kvyard's figure to the peer's."""

    peer: str  # "vllm" | "llama"
    concurrency: int
    prompts: int
    input_len: int
    output_len: int
    figure: str = THROUGHPUT
    goal: float | None = None
    floor: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once, {self.input_len} in, {self.output_len} out, {UNITS[self.figure]}"

    def verdict(self, ratio: float) -> str:
        if self.goal is None or self.floor is None:
            return ""
        better = ratio.__le__ if self.figure == FIRST_TOKEN else ratio.__ge__
        return "goal" if better(self.goal) else "floor" if better(self.floor) else "below its floor"


AGREED = (
    Work("vllm", 16, 48, 256, 128, goal=2.6, floor=2.0),
    Work("vllm", 1, 4, 256, 128, goal=3.0, floor=2.0),
    Work("vllm", 1, 8, 1024, 4, figure=FIRST_TOKEN, goal=0.5, floor=0.8),
    Work("vllm", 64, 128, 128, 64, goal=3.0, floor=2.0),
)
# Nothing is tuned to the lengths above: the same with others.
OTHER_LENGTHS = (
    Work("vllm", 16, 32, 32, 256),
    Work("vllm", 16, 32, 2048, 16),
    Work("vllm", 4, 16, 500, 100),
)
TABLES = {"agreed": AGREED, "other": OTHER_LENGTHS}


class Peers:
    def __init__(self, installed: str, scripts: str) -> None:
        self._scripts = Path(scripts).resolve()
        self._environment = {**os.environ, "PEER": str(Path(installed).resolve())}
        self._environment.pop("PYTHONPATH", None)

    @contextmanager
    def serving(self, peer: str) -> Iterator[Server]:
        port = free_port()
        command = ["bash", str(self._scripts / "serve.sh"), peer, str(port)]
        with server(command, f"http://127.0.0.1:{port}", "/health", environment=self._environment) as started:
            yield started

    def load(self, url: str, work: Work, seed: int) -> float:
        """The work's figure. Raises RuntimeError unless every request completed."""
        numbers = (work.concurrency, work.prompts, work.input_len, work.output_len)
        command = ["bash", str(self._scripts / "load.sh"), url, *map(str, numbers), "--seed", str(seed)]
        result = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        figures = dict(re.findall(r"^(.+?):\s+([\d.]+)\s*$", result.stdout, re.MULTILINE))
        if float(figures.get("Successful requests", 0)) != work.prompts:
            raise RuntimeError(f"{' '.join(command)}: not all completed\n{result.stdout}{result.stderr[-2000:]}")
        return float(figures[work.figure])


def compare(
    peers: Peers, works: Sequence[Work], rounds: int, flags: Sequence[str]
) -> Iterator[tuple[Work, list[float], list[float]]]:
    """(work, kvyard's figures, the peer's), round by round in turn. One peer at a time stands beside kvyard."""
    for peer in dict.fromkeys(work.peer for work in works):
        with (
            running("up", "--prefill=0", "--served-model-name=smol", *flags) as (ours, _),
            peers.serving(peer) as theirs,
        ):
            for work in (work for work in works if work.peer == peer):
                figures: dict[str, list[float]] = {ours: [], theirs.url: []}
                for url in figures:
                    peers.load(url, msgspec.structs.replace(work, prompts=work.concurrency), seed=999)  # warm
                for index in range(rounds):
                    for url in list(figures) if index % 2 == 0 else reversed(list(figures)):
                        figures[url].append(peers.load(url, work, seed=index))
                yield work, figures[ours], figures[theirs.url]


@click.command()
@click.option("--peer", "installed", envvar="PEER", help="folder that setup.sh filled; also PEER")
@click.option("--peers", "scripts", envvar="PEERS", help="folder of setup.sh, serve.sh and load.sh; also PEERS")
@click.option("--table", "names", type=click.Choice(list(TABLES)), multiple=True, default=list(TABLES))
@click.option("--rounds", default=5, show_default=True)
@click.option("--flag", "flags", multiple=True, help="passed on to kvyard up, such as --flag=--threads=2")
def main(installed: str | None, scripts: str | None, names: Sequence[str], rounds: int, flags: Sequence[str]) -> None:
    """Ratios of kvyard to its peers, medians of alternating rounds, beside what was agreed."""
    if not installed or not scripts:
        click.echo("skipped: the comparison with other engines needs --peer and --peers, or PEER and PEERS", err=True)
        sys.exit(0)
    peers = Peers(installed, scripts)
    for name in names:
        table = Table(title=f"{name}: {rounds} rounds {' '.join(flags)}")
        for column in ("work", "peer", "kvyard", "theirs", "ratio", "goal", "floor", ""):
            table.add_column(column, justify="left" if column in ("work", "peer", "") else "right")
        for work, ours, theirs in compare(peers, TABLES[name], rounds, flags):
            ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
            cells = [f"{statistics.median(figures):.1f}" for figures in (ours, theirs)]
            limits = ["" if limit is None else f"{limit:g}" for limit in (work.goal, work.floor)]
            table.add_row(work.name, work.peer, *cells, f"{ratio:.2f}", *limits, work.verdict(ratio))
            print(work.name, [round(value, 1) for value in ours], [round(value, 1) for value in theirs], flush=True)
        Console().print(table)


if __name__ == "__main__":
    main()
