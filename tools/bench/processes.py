"""Servers for a measurement: started, waited for, and gone when the block is left or the measuring process ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

KVYARD = (sys.executable, "-P", "-m", "tools.cli")
START_S = 300.0
STOP_S = 30.0
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def post_json(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def running(
    command: str, *flags: str, poll_s: float = POLL_S, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`kvyard COMMAND FLAGS` on a free port, from when `/ready` says so. Its log goes to stderr."""
    port = free_port()
    line = [*KVYARD, command, f"--port={port}", *flags]
    with server(line, f"http://127.0.0.1:{port}", "/ready", environment, poll_s) as started:
        yield started


@contextmanager
def server(
    command: Sequence[str],
    url: str,
    ready: str,
    environment: Mapping[str, str] | None = None,
    poll_s: float = POLL_S,
) -> Iterator[Server]:
    """Any server that answers 200 on the path `ready` once it is; ended with the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, preexec_fn=_end_with_parent)
    try:
        _wait_ready(process, url + ready, poll_s)
        yield Server(url, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """In the child, kept over exec: SIGTERM when this process ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _wait_ready(process: subprocess.Popen[bytes], url: str, poll_s: float) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with code {process.returncode} before {url} answered")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(poll_s)
    raise RuntimeError(f"{url} has not answered within {START_S:g} s")


def load(url: str, **settings: int) -> dict[str, Any]:
    """The report of `kvyard load`; raises RuntimeError unless every request completed and the verdict is "ok"."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    result = subprocess.run([*KVYARD, "load", url, "--json", *flags], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"kvyard load ended with {result.returncode}: {result.stdout}{result.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def descendants(pid: int) -> list[int]:
    """`pid` and all processes below it, parents first."""
    found = [pid]
    for parent in found:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children") as children:
                found += [int(child) for child in children.read().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
