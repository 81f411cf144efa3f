"""`up` over members that stand in for engines: what it starts, what it starts again, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.harness import MARK, ROOT, free_port, wait_for

FAKE = Path(__file__).with_name("fake_kvyard.py")
UP = f"""
import sys
from functools import partial
from actors.configuration import EngineConfiguration, UpConfiguration
from actors.kernel.run import run
from tools.deployment.process import run_deployment
up = UpConfiguration(port=int(sys.argv[1]), prefill=int(sys.argv[2]), decode=2)
engine = EngineConfiguration(api_key="hush", threads=3, drain_timeout=30.0)
sys.exit(run(partial(run_deployment, up, engine, command=[sys.executable, {str(FAKE)!r}])))
"""
LONG_S = 20.0  # nothing here takes a second; this is for a busy machine


class Up:
    def __init__(self, process: subprocess.Popen[str], mark: str, port: int) -> None:
        self.process, self.mark, self.port = process, mark, port
        self.log: list[str] = []

    def ready(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def read_log_until(self, words: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if words in line:
                return line
        raise AssertionError(f"no {words!r} in\n{''.join(self.log)}")

    def end(self) -> int:
        """The exit code; takes in the rest of what it says."""
        assert self.process.stderr is not None
        self.log += self.process.stderr.readlines()
        return self.process.wait(LONG_S)

    def engines(self) -> list[dict[str, Any]]:
        """What each engine of the fake deployment says, by the flags that the router got."""
        found = []
        for pid in self.pids():
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "serve" in arguments:
                port = next(a for a in arguments if a.startswith("--port=")).removeprefix("--port=")
                found.append(get(f"http://127.0.0.1:{port}/debug/engine"))
        return sorted(found, key=lambda engine: str(engine["engine_id"]))

    def pids(self) -> list[int]:
        """Every living process that carries this deployment's mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                    living = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
                except OSError:
                    continue
                if marked and living:
                    found.append(int(entry.name))
        return found


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=LONG_S) as answer:
        return json.load(answer)


@contextmanager
def up(prefill: int = 1, **environment: str) -> Iterator[Up]:
    mark, port = uuid.uuid4().hex, free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(port), str(prefill)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = Up(process, mark, port)
    try:
        yield running
        wait_for("no process left", lambda: not running.pids(), LONG_S)
    finally:
        for pid in running.pids():
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_ready_line_flags_and_drain() -> None:
    with up() as running:
        assert running.ready() == (
            f"kvyard ready: http://127.0.0.1:{running.port}/v1 model=fake-model prefill=1 decode=2 transport=tcp\n"
        )
        engines = running.engines()
        assert [engine["engine_id"] for engine in engines] == ["decode-0", "decode-1", "prefill-0"]
        for engine in engines:
            assert engine["flags"]["epoch"] == "1"
            assert engine["flags"]["role"] == engine["engine_id"].partition("-")[0]
            assert engine["omp"] == ["PASSIVE", "3"]
            assert engine["secret_mode"] == "0o600"
            assert engine["api_key"] == "hush"
            assert not any("hush" in argument for argument in engine["arguments"])
        secret = Path(engines[0]["flags"]["kv-secret-file"])
        assert len({engine["flags"]["kv-secret-file"] for engine in engines}) == 1
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0
        assert not secret.exists()
        drained = [line.split()[0] for line in running.log if line.endswith("drained\n")]
        assert drained[0] == "[router]"  # before its engines
        assert sorted(drained[1:]) == ["[decode-0]", "[decode-1]", "[prefill-0]"]
        assert running.process.stdout is not None
        assert running.process.stdout.read() == ""  # one line, no more


def test_an_engine_that_ends_comes_back_at_its_port_with_a_new_epoch() -> None:
    with up() as running:
        running.ready()
        before = running.engines()[0]
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"http://127.0.0.1:{before['flags']['port']}/die")
        assert running.read_log_until("it ended") == (
            "[decode-0] kvyard up: it ended with exit code 9; it starts again in 0.5 s\n"
        )
        running.read_log_until("[decode-0] kvyard up: ready again, epoch 2")
        after = running.engines()[0]
        assert after["flags"] == {**before["flags"], "epoch": "2"}
        assert after["pid"] != before["pid"]
        os.kill(after["pid"], signal.SIGKILL)
        assert "it was killed by SIGKILL; it starts again in 1 s" in running.read_log_until("it was")
        running.process.send_signal(signal.SIGTERM)  # while it waits to start again
        assert running.end() == 0
        assert not any("epoch 3" in line for line in running.log)


def test_the_router_that_ends_comes_back_too() -> None:
    with up() as running:
        running.ready()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"http://127.0.0.1:{running.port}/die")
        running.read_log_until("[router] kvyard up: ready again")
        assert get(f"http://127.0.0.1:{running.port}/ready") == {}
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0


def test_kill_9_leaves_no_process() -> None:
    with up() as running:
        running.ready()
        assert len(running.pids()) == 5
        running.process.kill()
        # That none is left is checked by `up` for every test.


def test_a_second_signal_kills_what_does_not_listen() -> None:
    with up(FAKE_DEAF="decode-1") as running:
        running.ready()
        running.process.send_signal(signal.SIGTERM)
        running.read_log_until("[decode-1] deaf")
        running.process.send_signal(signal.SIGTERM)
        running.end()  # long before the drain timeout of 30 s


@pytest.mark.parametrize(("member", "code"), [("prefill-0", 2), ("router", 1)])
def test_a_member_that_cannot_start_ends_all(member: str, code: int) -> None:
    with up(FAKE_EXIT=f"{member}:{code}") as running:
        assert running.ready() == ""
        assert running.end() == code
        assert f"[{member}] the reason why\n" in running.log
        assert any(f"kvyard up: {member} cannot start" in line for line in running.log)


def test_without_a_model_nothing_is_started(tmp_path: Path) -> None:
    with up(FAKE_EXIT="fetch-model:1", KVYARD_CACHE=str(tmp_path)) as running:
        assert running.end() == 1
        assert running.log == ["the reason why\n"]


def test_without_prefill_engines_all_do_everything() -> None:
    with up(prefill=0) as running:
        assert "prefill=0 decode=2" in running.ready()
        assert [engine["engine_id"] for engine in running.engines()] == ["both-0", "both-1"]
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
