"""`python -m tools.bench.interference`: what a reader of its leases costs an engine that decodes.

One engine of one thread holds leases of 256 MiB and decodes one stream. A second process READs all of them again and
again over NIXL, as fast as it can, in every other turn. The control connection's round trip is measured besides,
while the engine computes prompts as long as its token budget.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from actors.configuration import EngineConfiguration
from actors.messages.lease import KVLayout, LeaseOpened, OpenLease, RenewLeases, Ticket
from connectors.memory import KVMemory, block_ids_of
from connectors.ticket import load_secret, unseal
from connectors.transports.tcp_control import TcpNetwork
from tools.bench.processes import get_json, load, post_json, running
from tools.bench.transfer import BareReader

LEASED_BYTES = 256 << 20
PROMPT = 2000  # tokens
LEASE_S = 600


class ReaderSettings(msgspec.Struct, frozen=True):
    tickets: list[Ticket]
    layout: KVLayout


def vocabulary_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40000) for _ in range(length)]


def take_leases(url: str, secret: bytes, layout: KVLayout) -> ReaderSettings:
    """Prompts computed for a reader who never comes, until their blocks are LEASED_BYTES."""
    tickets: list[Ticket] = []
    while sum(-(-t.num_tokens // layout.block_size) for t in tickets) * layout.block_bytes < LEASED_BYTES:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": vocabulary_prompt(len(tickets), PROMPT),
            "kv_transfer_params": {"do_remote_decode": True},
        }
        answer = post_json(f"{url}/v1/completions", body)
        tickets.append(unseal(answer["kv_transfer_params"]["ticket"], secret))
    return ReaderSettings(tickets, layout)


async def read_for_ever(settings: ReaderSettings) -> None:
    """Prints the bytes of every round over all leases."""
    blocks = max(-(-ticket.num_tokens // settings.layout.block_size) for ticket in settings.tickets)
    pool = np.zeros(blocks * settings.layout.block_bytes, np.uint8)
    reader, opened = BareReader(KVMemory.of_array(pool, settings.layout.block_bytes)), []
    first = settings.tickets[0]
    link = await TcpNetwork().connect(first.host, first.port)
    for ticket in settings.tickets:
        question = OpenLease(
            ticket.engine_id, ticket.epoch, ticket.lease_id, ticket.capability, settings.layout, "bench", "nixl"
        )
        answer = await link.ask(question)
        assert isinstance(answer, LeaseOpened), answer
        opened.append(answer)
    while True:
        num_bytes = 0
        for lease in opened:
            targets = np.arange(block_ids_of(lease.block_ids).size, dtype=np.int32)
            reader.read(lease, targets)
            num_bytes += targets.size * settings.layout.block_bytes
        print(num_bytes, flush=True)


class Reader:
    """The reading process, while the block lasts; `gigabytes` is what it has read."""

    def __init__(self, settings: ReaderSettings) -> None:
        self._settings, self.num_bytes, self.seconds = settings, 0, 0.0

    def __enter__(self) -> Reader:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.bench.interference", "--read", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._settings))
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the first round is over: it reads
        self._began = time.monotonic()
        self._counter = threading.Thread(target=self._count)
        self._counter.start()
        return self

    def _count(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.num_bytes += int(line)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._process.kill()
        self._process.wait()
        self._counter.join()


async def control_round_trips(settings: ReaderSettings, count: int, pause_s: float) -> list[float]:
    """Seconds of each renewal, one after the other."""
    ticket = settings.tickets[0]
    link = await TcpNetwork().connect(ticket.host, ticket.port)
    question = RenewLeases(ticket.epoch, (ticket.lease_id,), (ticket.capability,))
    found = []
    for _ in range(count):
        start = time.perf_counter()
        await link.ask(question)
        found.append(time.perf_counter() - start)
        await anyio.sleep(pause_s)
    return found


def decode(url: str, output_len: int, seed: int) -> float:
    """Median seconds between two chunks of one stream."""
    report: dict[str, Any] = load(
        url, concurrency=1, requests=1, warm_up=1, input_len=64, output_len=output_len, seed=seed
    )
    return float(report["time_between_chunks_s"]["p50"])


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--output-len", default=400, show_default=True, help="tokens of each decode, about 10 s of them")
@click.option("--read", help="the reading process: settings on stdin", hidden=True)
def main(rounds: int, output_len: int, read: str | None) -> None:
    """Decode p50 with and without a reader of 256 MiB of leases; control round trips during prefill."""
    if read is not None:
        uvloop.run(read_for_ever(msgspec.json.decode(sys.stdin.buffer.read(), type=ReaderSettings)))
        return
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        secret_file.write_text("5" * 64)
        flags = ("--role=both", f"--kv-secret-file={secret_file}", f"--lease={LEASE_S}", "--threads=1")
        with running("serve", *flags) as (url, _):
            layout = msgspec.convert(get_json(f"{url}/debug/engine")["kv_layout"], KVLayout)
            settings = take_leases(url, load_secret(str(secret_file)), layout)
            alone: list[float] = []
            beside: list[float] = []
            rates: list[float] = []
            for index in range(rounds):
                for with_reader in (index % 2 == 0, index % 2 == 1):
                    if with_reader:
                        with Reader(settings) as reader:
                            beside.append(decode(url, output_len, index))
                        rates.append(reader.num_bytes / reader.seconds / 1e9)
                    else:
                        alone.append(decode(url, output_len, index))
            trips = _during_prefill(url, settings)
    table = Table(title=f"{LEASED_BYTES >> 20} MiB of leases read again and again, {rounds} rounds")
    for column in ("", "alone", "beside the reader", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    a, b = statistics.median(alone) * 1e3, statistics.median(beside) * 1e3
    ratio = statistics.median(y / x for x, y in zip(alone, beside, strict=True))
    table.add_row("decode p50, ms", f"{a:.1f}", f"{b:.1f}", f"{ratio:.2f}")
    table.add_row("read, GB/s", "", f"{statistics.median(rates):.1f}", "")
    Console().print(table)
    trips.sort()
    p50, p99 = trips[len(trips) // 2] * 1e3, trips[int(len(trips) * 0.99)] * 1e3
    Console().print(f"control round trip during prefill: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(trips)} of them")


def _during_prefill(url: str, settings: ReaderSettings) -> list[float]:
    """Round trips while the engine computes prompts of its whole token budget, one after the other."""
    budget = EngineConfiguration().max_num_batched_tokens
    ended = threading.Event()

    def prefill() -> None:
        seed = 1000
        while not ended.is_set():
            seed += 1
            body = {"model": "smollm2-135m-instruct", "prompt": vocabulary_prompt(seed, budget), "max_tokens": 1}
            post_json(f"{url}/v1/completions", body)

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(prefill) for _ in range(2)]
        time.sleep(1.0)
        try:
            trips = uvloop.run(control_round_trips(settings, 1000, 0.005))
        finally:
            ended.set()
        for future in futures:
            future.result()
    return trips


if __name__ == "__main__":
    main()
