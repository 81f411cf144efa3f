"""Endpoints for the tests: one in this process, and one in a process of its own that a test may stop and kill.

The pool of a peer process is filled from its seed (`pattern`), so a test knows every byte without asking.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from actors.configuration import Transport as TransportSetting
from actors.messages.lease import KVLayout, Ticket
from actors.messages.transfer import BlocksLanded, GrantLease, LoadBlocks, TransferFailed, TransferReport
from connectors.endpoint import KVEndpoint
from connectors.memory import KVMemory
from connectors.ticket import unseal

SECRET = b"a secret for tests"
LAYOUT = KVLayout(
    model_digest="00" * 32,
    dtype="bfloat16",
    block_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_size=64,
    rope_theta=10000.0,
    rope_scaling="",
)  # blocks of 32 KiB
R = TypeVar("R")


def int32(values: Sequence[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def pattern(seed: int, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, num_blocks * block_bytes, dtype=np.uint8)


class Side:
    """An endpoint of this process with its pool and its reports."""

    def __init__(self, pool: npt.NDArray[np.uint8], layout: KVLayout, **settings: Any) -> None:
        self.layout = layout
        self.reports: list[TransferReport] = []
        self._changed = anyio.Event()
        self.blocks = pool.reshape(-1, layout.block_bytes)
        values: dict[str, Any] = {
            "engine_id": "decode-0",
            "epoch": 1,
            "host": "127.0.0.1",
            "port": 0,
            "transport": "tcp",
            "lease_s": 30.0,
            "renewal_s": 5.0,
            "clock": time.monotonic,
            "token_bytes": secrets.token_bytes,
        }
        memory = KVMemory.of_array(pool, layout.block_bytes)
        self.endpoint = KVEndpoint(memory=memory, layout=layout, report=self._report, **(values | settings))

    def _report(self, report: TransferReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def wait_for(self, kind: type[R], request_id: str, seconds: float = 10.0) -> R:
        """The first report of this kind for this request; fails with what was reported instead."""
        with anyio.move_on_after(seconds):
            while True:
                for report in self.reports:
                    if isinstance(report, kind) and getattr(report, "request_id", request_id) == request_id:
                        return report
                ended = any(isinstance(report, TransferFailed | BlocksLanded) for report in self.of(request_id))
                if ended and kind in (TransferFailed, BlocksLanded):
                    break
                self._changed = anyio.Event()
                await self._changed.wait()
        raise AssertionError(f"no {kind.__name__} for {request_id!r}, but {self.reports}")

    def order(
        self, request_id: str, ticket: Ticket, targets: Sequence[int], *, first: int = 0, timeout_s: float = 10.0
    ) -> LoadBlocks:
        return LoadBlocks(request_id, 1, ticket, first, int32(targets), timeout_s)

    def of(self, request_id: str) -> list[TransferReport]:
        return [report for report in self.reports if getattr(report, "request_id", None) == request_id]


@asynccontextmanager
async def running(side: Side) -> AsyncIterator[Side]:
    async with anyio.create_task_group() as tasks:
        await side.endpoint.start(tasks)
        try:
            yield side
        finally:
            with anyio.CancelScope(shield=True):
                await side.endpoint.stop()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def reader(
    num_blocks: int = 256, layout: KVLayout = LAYOUT, transport: TransportSetting = "tcp", **settings: Any
) -> AsyncIterator[Side]:
    pool = np.zeros(num_blocks * layout.block_bytes, np.uint8)
    async with running(Side(pool, layout, transport=transport, **settings)) as side:
        yield side


class PeerProcess:
    """A prefill endpoint in a process of its own (spawned). Used from the test's thread, line by line."""

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = {"seed": 1, "num_blocks": 256, "epoch": 1, "port": 0, "transport": "tcp"}
        self.settings |= {"lease_s": 30.0} | settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.peer", json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | settings.get("env", {}),
        )
        self.port = int(self._line("ready")[0])
        self.blocks = pattern(self.settings["seed"], self.settings["num_blocks"], LAYOUT.block_bytes).reshape(
            -1, LAYOUT.block_bytes
        )

    def _line(self, word: str) -> list[str]:
        """The rest of the next line that begins with `word`; reports in between are dropped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
        raise AssertionError(f"the peer ended before it said {word!r}")

    def _say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def grant(self, request_id: str, block_ids: Sequence[int]) -> Ticket:
        self._say("grant", request_id, ",".join(map(str, block_ids)))
        return unseal(self._line("granted")[0], SECRET)

    async def wait_report(self, kind: str, request_id: str) -> None:
        while (await anyio.to_thread.run_sync(self._line, kind))[0] != request_id:
            pass

    def scribble(self) -> None:
        """Turns over every bit of the pool, as if all blocks had new owners."""
        self._say("scribble")
        self._line("scribbled")

    def idle_share(self, seconds: float) -> float:
        """CPU time of the peer over wall time, in a window of `seconds` without work for it."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - before) / seconds

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()

    def finish(self) -> int:
        """Orderly end; the exit code."""
        self._say("stop")
        return self.process.wait(10)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def grant_order(request_id: str, block_ids: Sequence[int]) -> GrantLease:
    return GrantLease(request_id, 1, int32(block_ids), 16 * len(block_ids), b"digest")
