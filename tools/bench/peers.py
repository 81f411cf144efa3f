"""The servers that kvyard is measured against, loaded in turn with ours by a client that none of us wrote.

Needs two folders: PEER, where vLLM's CPU build and llama.cpp are installed, and PEERS, whose setup.sh installed them
and whose serve.sh and load.sh start and load them. Both servers of a comparison stand side by side all the time. No two
loads of a server share their prompts, but those of a round are the same for both, so no prefix cache helps either.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tools.bench.processes import Server, free_port, running, server
from tools.bench.rows import Measured, Row, failed

THROUGHPUT, FIRST_TOKEN = "Output token throughput (tok/s)", "Median TTFT (ms)"
SEEDS_PER_LOAD, WARM_UP_SEED = 1000, 999
STORED = ("--model={gguf}", "--weights=stored")  # the peer's own file, computed on as it is


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` are for kvyard; "{gguf}" in them is llama.cpp's model file."""

    peer: str  # "vllm" | "llama"
    concurrency: int
    prompts: int
    input_len: int
    output_len: int
    spread: float = 0.0  # lengths are drawn evenly from (1 ± spread) of these
    figure: str = THROUGHPUT
    flags: tuple[str, ...] = ()


class Loaded(msgspec.Struct, frozen=True):
    figure: float  # of the completed requests
    completed: int

    def as_if_complete(self, load: Load) -> float:
        """A throughput as if the requests that failed had brought tokens as the others did."""
        return self.figure if load.figure == FIRST_TOKEN else self.figure * load.prompts / self.completed


class Peers:
    def __init__(self, installed: str, scripts: str) -> None:
        self._installed, self._scripts = Path(installed).resolve(), Path(scripts).resolve()
        self._environment = {**os.environ, "PEER": str(self._installed)}
        self._environment.pop("PYTHONPATH", None)

    def flags(self, load: Load) -> list[str]:
        """Raises RuntimeError when the file is not there, or not the only one."""
        if not any("{gguf}" in flag for flag in load.flags):
            return list(load.flags)
        files = sorted((self._installed / "gguf").glob("*.gguf"))
        if len(files) != 1:
            raise RuntimeError(f"{self._installed / 'gguf'} holds {len(files)} .gguf files, one is needed")
        return [flag.format(gguf=files[0]) for flag in load.flags]

    @contextmanager
    def serving(self, peer: str) -> Iterator[Server]:
        port = free_port()
        command = ["bash", str(self._scripts / "serve.sh"), peer, str(port)]
        with server(command, f"http://127.0.0.1:{port}", "/health", environment=self._environment) as started:
            yield started

    def load(self, url: str, load: Load, seed: int, may_fail: int = 0) -> Loaded:
        """Raises RuntimeError when more requests than `may_fail` were not completed."""
        numbers = (load.concurrency, load.prompts, load.input_len, load.output_len)
        more = ["--seed", str(seed)] + (["--random-range-ratio", f"{load.spread:g}"] if load.spread else [])
        command = ["bash", str(self._scripts / "load.sh"), url, *map(str, numbers), *more]
        result = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        figures = figures_of(result.stdout)
        completed = int(figures.get("Successful requests", 0))
        if completed < load.prompts - may_fail:
            said = f"{completed} of {load.prompts} requests completed"
            raise RuntimeError(f"{said}\n{' '.join(command)}\n{result.stdout}{result.stderr[-2000:]}")
        return Loaded(figures[load.figure], completed)


def figures_of(report: str) -> dict[str, float]:
    """The lines `name: number` of the client's report."""
    return {name: float(value) for name, value in re.findall(r"^(.+?):\s+([\d.]+)\s*$", report, re.MULTILINE)}


def compare(peers: Peers, loads: Mapping[Row, Load], rounds: int) -> Iterator[tuple[Row, Measured]]:
    """Row by row; what cannot be measured says why. Rows of one peer and the same flags share their two servers."""
    seeds = {row: index * SEEDS_PER_LOAD for index, row in enumerate(loads)}
    pairs = dict.fromkeys((load.peer, load.flags) for load in loads.values())
    for peer, flags in pairs:
        rows = [row for row, load in loads.items() if (load.peer, load.flags) == (peer, flags)]
        done = 0
        try:
            own = peers.flags(loads[rows[0]])
            with running("up", "--prefill=0", "--served-model-name=smol", *own) as ours, peers.serving(peer) as theirs:
                for row in rows:
                    measured = _in_turn(peers, loads[row], (ours.url, theirs.url), rounds, seeds[row])
                    done += 1
                    yield row, measured
        except Exception as error:
            for row in rows[done:]:
                yield row, failed(error)


def _in_turn(peers: Peers, load: Load, urls: Sequence[str], rounds: int, seed: int) -> Measured:
    """`urls`: ours, the peer's. All our requests have to complete; what the peer fails at is told and taken as done."""
    own, _ = urls
    found: dict[str, list[Loaded]] = {url: [] for url in urls}
    try:
        for url in urls:
            warm_up = msgspec.structs.replace(load, prompts=load.concurrency)
            peers.load(url, warm_up, seed + WARM_UP_SEED, 0 if url == own else load.concurrency)
        for index in range(rounds):
            for url in urls if index % 2 == 0 else reversed(urls):
                may_fail = 0 if url == own else load.prompts // 4
                found[url].append(peers.load(url, load, seed + index, may_fail))
    except Exception as error:
        return failed(error)
    ours, theirs = ([loaded.as_if_complete(load) for loaded in each] for each in found.values())
    lost = sum(load.prompts - loaded.completed for loaded in found[urls[1]])
    note = f"the peer failed at {lost} of {rounds * load.prompts} requests, which count as if they had been done"
    return Measured(tuple(ours), tuple(theirs), note if lost else "")
