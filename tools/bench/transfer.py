"""`python -m tools.bench.transfer`: a whole load (open, READ, verify, release) against a bare READ of the same bytes.

Two processes on this machine, blocks of the default model in bfloat16. The bare READ is NIXL alone on an agent of its
own in the reading process: one request, polled without a pause, no control, no checksums. The two take turns on the
same blocks; the table has the medians. The tcp transport is measured against the same bare READ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from actors.messages.lease import KVLayout, LeaseOpened, OpenLease, ReleaseLease, Ticket
from actors.messages.transfer import BlocksLanded, GrantLease, LeaseGranted, LoadBlocks, TransferFailed, TransferReport
from connectors.endpoint import KVEndpoint
from connectors.memory import BlockIds, KVMemory, block_ids_of
from connectors.transports import nixl_agent
from connectors.transports.tcp_control import TcpLink, TcpNetwork

LAYOUT = KVLayout(
    model_digest="smollm2-135m",
    dtype="bfloat16",
    block_size=16,
    num_layers=30,
    num_kv_heads=3,
    head_size=64,
    rope_theta=100000.0,
    rope_scaling="",
)  # blocks of 368,640 bytes
POOL_BLOCKS = 512
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Ticket).decode


def endpoint(
    engine_id: str, pool: np.ndarray[Any, np.dtype[np.uint8]], transport: Any, report: Callable[[TransferReport], None]
) -> KVEndpoint:
    return KVEndpoint(
        memory=KVMemory.of_array(pool, LAYOUT.block_bytes),
        layout=LAYOUT,
        engine_id=engine_id,
        epoch=1,
        host="127.0.0.1",
        port=0,
        transport=transport,
        lease_s=30.0,
        renewal_s=5.0,
        clock=time.monotonic,
        token_bytes=secrets.token_bytes,
        report=report,
    )


async def lend(transport: str) -> None:
    """The lending process: a line of block ids on stdin gives a line with a ticket on stdout."""

    def report(what: TransferReport) -> None:
        if isinstance(what, LeaseGranted):
            print(_encode(what.ticket).decode(), flush=True)

    pool = np.random.default_rng(1).integers(0, 256, POOL_BLOCKS * LAYOUT.block_bytes, dtype=np.uint8)
    async with anyio.create_task_group() as tasks:
        lender = endpoint("prefill", pool, transport, report)
        await lender.start(tasks)
        generation = 0
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            generation += 1
            block_ids = np.array(json.loads(line), dtype="<i4").tobytes()
            lender.handle(GrantLease("bench", generation, block_ids, 16, b""))
        await lender.stop()
        tasks.cancel_scope.cancel()


class BareReader:
    """NIXL and nothing else."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory, self._agent = memory, nixl_agent.make_agent("bare")[0]
        self._registration = self._agent.register_memory([(memory.address, memory.num_bytes, 0, "kv")], "DRAM")
        self._peer: Any = None

    def read(self, opened: LeaseOpened, targets: BlockIds) -> float:
        if self._peer is None:
            self._peer = self._agent.add_remote_agent(opened.agent_metadata)
        agent, start = self._agent, time.perf_counter()
        handle = agent.initialize_xfer(
            "READ",
            self._descriptors(targets, self._memory.address),
            self._descriptors(block_ids_of(opened.block_ids), opened.pool_address),
            self._peer.decode() if isinstance(self._peer, bytes) else self._peer,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
        return seconds

    def _descriptors(self, block_ids: BlockIds, base: int) -> Any:
        size = self._memory.block_bytes
        rows = np.zeros((block_ids.size, 3), dtype=np.uint64)
        rows[:, 0] = block_ids.astype(np.uint64) * np.uint64(size) + np.uint64(base)
        rows[:, 1] = size
        return self._agent.get_xfer_descs(rows, "DRAM")

    def close(self) -> None:
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registration)


def measure(transport: str, num_blocks: int, rounds: int, seed: int) -> tuple[list[float], list[float]]:
    """Seconds of the loads and of the bare READs, after a warm-up of three rounds."""
    command = [sys.executable, "-m", "tools.bench.transfer", "--lend", transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        try:
            return uvloop.run(_measure(lender, transport, num_blocks, rounds + 3, seed))
        finally:
            assert lender.stdin is not None
            lender.stdin.close()


async def _measure(
    lender: subprocess.Popen[str], transport: str, num_blocks: int, rounds: int, seed: int
) -> tuple[list[float], list[float]]:
    loop, random = asyncio.get_running_loop(), np.random.default_rng(seed)
    pool = np.ones(POOL_BLOCKS * LAYOUT.block_bytes, np.uint8)
    ends: dict[int, asyncio.Future[TransferReport]] = {}

    def report(what: TransferReport) -> None:
        if isinstance(what, BlocksLanded | TransferFailed):
            ends[what.generation].set_result(what)

    def grant(sources: BlockIds) -> Ticket:
        assert lender.stdin is not None
        assert lender.stdout is not None
        lender.stdin.write(json.dumps(sources.tolist()) + "\n")
        lender.stdin.flush()
        return _decode(lender.stdout.readline())

    async def bare_read(ticket: Ticket, link: TcpLink, targets: BlockIds) -> float:
        opened = await link.ask(
            OpenLease(ticket.engine_id, 1, ticket.lease_id, ticket.capability, LAYOUT, "bare", ticket.transport)
        )
        assert isinstance(opened, LeaseOpened), opened
        seconds = await anyio.to_thread.run_sync(bare.read, opened, targets)
        await link.ask(ReleaseLease(1, ticket.lease_id, ticket.capability))
        return seconds

    async def load(ticket: Ticket, targets: BlockIds, generation: int) -> float:
        """Seconds on the load's own clock, from just before its OpenLease to the answered ReleaseLease."""
        end = ends[generation] = loop.create_future()
        reader.handle(LoadBlocks("bench", generation, ticket, 0, targets.astype("<i4").tobytes(), 30.0))
        landed = await end
        assert isinstance(landed, BlocksLanded), landed
        return landed.seconds

    loads, bares = [], []
    async with anyio.create_task_group() as tasks:
        reader = endpoint("decode", pool, transport, report)
        await reader.start(tasks)
        bare = BareReader(KVMemory.of_array(pool, LAYOUT.block_bytes))
        link: TcpLink | None = None
        for index in range(rounds):
            sources, targets = (random.permutation(POOL_BLOCKS)[:num_blocks].astype(np.int32) for _ in range(2))
            for turn in (index % 2, 1 - index % 2):
                ticket = await anyio.to_thread.run_sync(grant, sources)
                link = link or await TcpNetwork().connect(ticket.host, ticket.port)
                await anyio.sleep(0.01)  # the grant's checksums are done: they are not part of a load
                if turn:
                    loads.append(await load(ticket, targets, index))
                elif transport == "nixl":
                    bares.append(await bare_read(ticket, link, targets))
        if link is not None:
            link.close("done")
        bare.close()
        await reader.stop()
        tasks.cancel_scope.cancel()
    return loads[3:], bares[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="blocks per load (64 are 1,024 tokens)")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)
    if arguments.lend:
        uvloop.run(lend(arguments.lend))
        return
    loads, bares = measure("nixl", arguments.blocks, arguments.rounds, arguments.seed)
    tcp_loads, _ = measure("tcp", arguments.blocks, arguments.rounds, arguments.seed)
    show(arguments, {"bare NIXL READ": bares, "load over nixl": loads, "load over tcp": tcp_loads})


def show(arguments: argparse.Namespace, columns: dict[str, list[float]]) -> None:
    bare = statistics.median(columns["bare NIXL READ"])
    num_bytes = arguments.blocks * LAYOUT.block_bytes
    rows = [
        {
            "what": what,
            "p50_ms": statistics.median(seconds) * 1e3,
            "p90_ms": statistics.quantiles(seconds, n=10)[8] * 1e3,
            "gigabytes_per_s": num_bytes / statistics.median(seconds) / 1e9,
            "ratio_to_bare": statistics.median(seconds) / bare,
        }
        for what, seconds in columns.items()
    ]
    if arguments.json:
        print(json.dumps({"bytes": num_bytes, "rounds": arguments.rounds, "rows": rows}))
        return
    table = Table(title=f"{arguments.blocks} blocks, {num_bytes / 1e6:.1f} MB, {arguments.rounds} rounds")
    for name in ("", "p50 ms", "p90 ms", "GB/s", "ratio to bare"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        figures = [f"{value:.2f}" for value in list(row.values())[1:] if isinstance(value, float)]
        table.add_row(str(row["what"]), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
