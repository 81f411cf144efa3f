"""Servers of a measurement go with it, also when it is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

SECONDS = 20.0
MEASURING = """
import sys, time
from tools.bench.processes import free_port, server
port = free_port()
command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
with server(command, f"http://127.0.0.1:{port}", "/", poll_s=0.02) as started:
    print(started.process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_server_ends_with_the_process_that_measures() -> None:
    measuring = subprocess.Popen(
        [sys.executable, "-c", MEASURING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert measuring.stdout is not None
    server = os.pidfd_open(int(measuring.stdout.readline()))
    try:
        measuring.send_signal(signal.SIGKILL)
        measuring.communicate()
        ended, _, _ = select.select([server], [], [], SECONDS)
        assert ended, "the server runs on"
    finally:
        os.close(server)
