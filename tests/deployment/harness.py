"""Real deployments for the tests: `kvyard up` in processes of its own, watched from outside.

Every process of a deployment inherits a mark in its environment, so `leftovers` finds each of them, whoever its parent
is by then. `Deployment` is a context manager that leaves no process behind, also when the test fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from actors.kernel.process import PARENT_PID

ROOT = Path(__file__).parents[2]
MARK = "KVYARD_TEST_DEPLOYMENT"
READY_S = 120.0
QUIET_S = 45.0  # a lease of the tests is shorter


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get_json(url: str, timeout: float = 10.0) -> Any:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return json.load(answer)


def wait_for(what: str, condition: Any, seconds: float, pause: float = 0.05) -> Any:
    """The first true value of `condition()`, asked until `seconds` have passed."""
    end = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except OSError:
            value = None
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


class Deployment:
    """`up` with the flags given; the context manager's value once it has said that it is ready."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Closed in `close`.
        self._log = tempfile.NamedTemporaryFile("w+", prefix="kvyard-test-", suffix=".log")  # noqa: SIM115
        argv = [sys.executable, "-m", "tools.cli", "up", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            # As a child of `spawn`, `up` dies with the test run, and with it everything below.
            env={**os.environ, **(environment or {}), MARK: self.mark, PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Deployment:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log()[-6000:], file=sys.stderr)
        self.close()

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("kvyard ready: "), f"instead of the ready line: {line!r}\n{self.log()}"
        return line

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def engines(self) -> list[dict[str, Any]]:
        """`/debug/engines` of the router."""
        return list(get_json(f"{self.url}/debug/engines"))

    def engine(self, engine_id: str) -> dict[str, Any]:
        return next(engine for engine in self.engines() if engine["engine_id"] == engine_id)

    def intervals(self, request_id: str, engine_id: str) -> list[dict[str, Any]]:
        """The story of a request at one engine, by the X-Request-ID that its client sent. Raises OSError: none yet."""
        return list(get_json(f"{self.engine(engine_id)['url']}/debug/requests/{request_id}")["intervals"])

    def wait_state(self, request_id: str, engine_id: str, reason: str, seconds: float = 30.0, age: float = 0.0) -> None:
        """Until the request has been in the state `reason` at the engine for `age` seconds."""

        def there() -> bool:
            last = self.intervals(request_id, engine_id)[-1]
            return bool(last["reason"] == reason and last["seconds"] >= age)

        wait_for(f"{request_id} is {reason} for {age:g} s at {engine_id}", there, seconds, pause=0.01)

    def metric(self, engine_id: str, name: str, **labels: str) -> float:
        """One sample of an engine's own /metrics."""
        with urllib.request.urlopen(f"{self.engine(engine_id)['url']}/metrics", timeout=10.0) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return next(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        )

    def signal(self, engine_id: str, number: signal.Signals, *, engine: bool = True, worker: bool = True) -> None:
        found = self.engine(engine_id)
        for pid in [found["pid"]] * engine + found["worker_pids"] * worker:
            os.kill(pid, number)

    def wait_restarted(self, before: dict[str, Any], seconds: float = 60.0) -> dict[str, Any]:
        """Until the engine that `before` lists is healthy again at the same port, with a higher epoch."""

        def back() -> dict[str, Any] | None:
            now = self.engine(before["engine_id"])
            return now if now["healthy"] and now["epoch"] > before["epoch"] else None

        after: dict[str, Any] = wait_for(f"{before['engine_id']} is back", back, seconds)
        assert (after["url"], after["role"]) == (before["url"], before["role"])
        assert after["pid"] != before["pid"]
        return after

    def blocks(self) -> dict[str, dict[str, Any]]:
        return dict(get_json(f"{self.url}/debug/blocks"))

    def wait_quiet(self, seconds: float = QUIET_S) -> None:
        """Until no engine holds, fences, leases or quarantines a block."""

        def quiet() -> bool:
            reports = self.blocks()
            assert set(reports) == {engine["engine_id"] for engine in self.engines()}
            return all(report["free"] == report["usable"] and report["grants"] == [] for report in reports.values())

        try:
            wait_for("every block free", quiet, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.blocks())[:3000]}") from None

    def wait_healthy(self, seconds: float = 60.0) -> None:
        wait_for(
            "all engines healthy",
            lambda: (engines := self.engines()) and all(engine["healthy"] for engine in engines),
            seconds,
        )

    def leftovers(self) -> list[int]:
        """Pids that still carry the mark of this deployment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                except OSError:
                    continue
                if f"{MARK}={self.mark}".encode() in environment and state not in "ZX":
                    found.append(int(entry.name))
        return found

    def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM to `up`; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        left = self.leftovers()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        assert left == [], f"processes left behind: {left}"
