"""`python -m tools.bench.time_budget`: who uses the cores in a decode step, thread by thread.

A deployment decodes a fixed number of requests; over a window in which all of them run, the kernel's own accounts of
each thread (/proc/PID/task/TID/schedstat) are divided by the number of steps. "ready" is time in which a thread could
have run and had no core: what the processes take from each other.
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from tools.bench.processes import KVYARD, descendants, running

POLL_S = 0.1
START_S = 120.0  # for all requests to run
Key = tuple[str, str]  # process, thread


class Accounts(NamedTuple):
    """At one moment: seconds on a core, and ready without one, by thread; steps so far, and their time in all."""

    at: float
    on_core: dict[Key, float]
    ready: dict[Key, float]
    steps: float
    in_steps: float


def metric(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def exposition(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def accounts(url: str, pids: list[int]) -> Accounts:
    on_core: dict[Key, float] = {}
    ready: dict[Key, float] = {}
    text = exposition(url)
    at = time.monotonic()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                used, waited, _ = (task / "schedstat").read_text().split()
                name = (task / "comm").read_text().strip()
            except OSError:
                continue  # it has just ended
            key = (_process_name(pid), "main" if int(task.name) == pid else _thread_name(name))
            on_core[key] = on_core.get(key, 0.0) + int(used) / 1e9
            ready[key] = ready.get(key, 0.0) + int(waited) / 1e9
    steps, seconds = (metric(text, f"kvyard_step_seconds_{part}") for part in ("count", "sum"))
    return Accounts(at, on_core, ready, steps, seconds)


def _thread_name(comm: str) -> str:
    return comm.removeprefix("kvyard-") if comm.startswith("kvyard-") else "others"


def _process_name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "actors.worker" in words:
        return "worker"
    names = {"serve": "engine", "router": "router", "load": "client", "up": "up"}
    return next((names[word] for word in words if word in names), Path(words[0]).name)


def table(before: Accounts, after: Accounts, title: str) -> Table:
    steps, wall = after.steps - before.steps, after.at - before.at
    result = Table(title=f"{title}: {wall / steps * 1e3:.2f} ms per step over {steps:.0f} steps")
    for column in ("process", "thread", "on a core, ms", "ready, ms", "% of a core"):
        result.add_column(column, justify="left" if column in ("process", "thread") else "right")
    for (process, thread), used in sorted(after.on_core.items()):
        on_core = used - before.on_core.get((process, thread), 0.0)
        ready = after.ready[process, thread] - before.ready.get((process, thread), 0.0)
        if on_core / wall >= 0.0005:
            cells = (f"{on_core / steps * 1e3:.3f}", f"{ready / steps * 1e3:.3f}", f"{on_core / wall * 100:.1f}")
            result.add_row(process, thread, *cells)
    total = sum(after.on_core.values()) - sum(before.on_core.values())
    result.caption = (
        f"all together {total / steps * 1e3:.2f} ms on cores per step; plan to result "
        f"{(after.in_steps - before.in_steps) / steps * 1e3:.2f} ms"
    )
    return result


def window(url: str, pids: list[int], concurrency: int, output_len: int, input_len: int, seconds: float) -> Table:
    flags = (f"--concurrency={concurrency}", f"--requests={concurrency}", f"--input-len={input_len}")
    command = [*KVYARD, "load", url, "--json", "--warm-up=0", *flags, f"--output-len={output_len}"]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while metric(exposition(url), "kvyard_requests_running") < concurrency or _prefills(url):
            if client.poll() is not None or time.monotonic() > end:
                raise click.ClickException(f"never did {concurrency} requests decode at once; give a larger output")
            time.sleep(POLL_S)
        watched = [*pids, client.pid]
        before = accounts(url, watched)
        time.sleep(seconds)
        after = accounts(url, watched)
        if metric(exposition(url), "kvyard_requests_running") < concurrency:
            raise click.ClickException("requests ended within the window: give a larger output or a shorter window")
    finally:
        client.terminate()
        client.wait()
    return table(before, after, f"{concurrency} running")


def _prefills(url: str) -> bool:
    """Whether prompts are still computed: more tokens than steps times requests in a moment's steps."""
    first = exposition(url)
    time.sleep(POLL_S)
    second = exposition(url)
    steps = metric(second, "kvyard_step_seconds_count") - metric(first, "kvyard_step_seconds_count")
    tokens = metric(second, "kvyard_step_tokens_total") - metric(first, "kvyard_step_tokens_total")
    return steps == 0 or tokens > steps * metric(second, "kvyard_requests_running")


@click.command()
@click.option("--concurrency", "concurrencies", multiple=True, type=int, default=(16, 64, 256), show_default=True)
@click.option("--input-len", default=64, show_default=True)
@click.option("--output-len", default=1500, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="of the window")
@click.option("--flag", "flags", multiple=True, help="passed on to kvyard up, such as --flag=--threads=2")
def main(
    concurrencies: tuple[int, ...], input_len: int, output_len: int, seconds: float, flags: tuple[str, ...]
) -> None:
    """CPU time of every thread of `kvyard up --prefill 0` and its client, per step."""
    most = f"--max-num-seqs={max(concurrencies)}"
    with running("up", "--prefill=0", "--kv-memory=4GiB", most, *flags) as (url, process):
        pids = descendants(process.pid)
        for concurrency in concurrencies:
            Console().print(window(url, pids, concurrency, output_len, input_len, seconds))
            while metric(exposition(url), "kvyard_requests_running"):
                time.sleep(POLL_S)


if __name__ == "__main__":
    main()
