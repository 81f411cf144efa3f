"""TransferActors in one process: orders in, reports out; and 500 seeds of faults, with exactly one report per order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from actors.kernel.actor import Actor
from actors.kernel.address import Address
from actors.kernel.reply import Reply
from actors.kernel.system import ActorSystem
from actors.messages.errors import ConfigurationError
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    CancelLoad,
    HoldTicket,
    LeaseDenied,
    LeaseExpired,
    LeaseGranted,
    LoadBlocks,
    PeerLost,
    ReleaseTicket,
    RevokeLease,
    TransferFailed,
    TransferReport,
)
from actors.transfer import TransferActor
from connectors.memory import KVMemory
from connectors.transports.in_process import InProcessNetwork, InProcessTransport, Neighbourhood
from tests.connectors.harness import LAYOUT, grant_order, int32, pattern

BLOCKS = 64


class News:
    """What both sides of a pair have reported changed: look again."""

    def __init__(self) -> None:
        self.event = anyio.Event()

    def spread(self) -> None:
        self.event.set()
        self.event = anyio.Event()

    async def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        with anyio.fail_after(seconds):
            while not condition():
                await self.event.wait()


class Reports(Actor[TransferReport]):
    def __init__(self, name: str, news: News) -> None:
        super().__init__(name)
        self.all: list[TransferReport] = []
        self._news = news

    async def receive(self, message: TransferReport, reply: Reply) -> None:
        self.all.append(message)
        self._news.spread()

    async def one(self, kind: type, request_id: str) -> Any:
        await self._news.until(lambda: self.of(kind, request_id))
        return self.of(kind, request_id)[0]

    def of(self, kind: type, request_id: str) -> list[TransferReport]:
        return [r for r in self.all if isinstance(r, kind) and getattr(r, "request_id", "") == request_id]


class Pair:
    """A lending and a loading actor in one neighbourhood."""

    def __init__(self, name: str, *, fault: str | None = None, lease_s: float = 30.0) -> None:
        self.neighbourhood, self.name = Neighbourhood(), name
        self.news = News()
        self.reports = {side: Reports(f"{name} {side} reports", self.news) for side in ("p", "d")}
        self.pools = {
            "p": pattern(1, BLOCKS, LAYOUT.block_bytes),
            "d": np.zeros(BLOCKS * LAYOUT.block_bytes, np.uint8),
        }
        self.actors = {
            side: TransferActor(
                f"{name} {side}",
                memory=KVMemory.of_array(self.pools[side], LAYOUT.block_bytes),
                layout=LAYOUT,
                engine_id=f"engine-{side}",
                epoch=1,
                host="here",
                lease_s=lease_s,
                renewal_s=0.02,
                reports=self.reports[side].address,
                clock=time.monotonic,
                token_bytes=random.Random(name + side).randbytes,
                fault=fault if side == "d" else None,
                network=InProcessNetwork(self.neighbourhood),
                transports={"in_process": InProcessTransport(self.neighbourhood)},
            )
            for side in ("p", "d")
        }

    async def start(self, system: ActorSystem) -> None:
        for side in ("p", "d"):
            await system.start(self.reports[side])
            await system.start(self.actors[side])

    @property
    def prefill(self) -> Address[Any]:
        return self.actors["p"].address

    @property
    def decode(self) -> Address[Any]:
        return self.actors["d"].address

    def blocks(self, side: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.pools[side].reshape(BLOCKS, -1)

    async def ticket(self, request_id: str, block_ids: list[int]) -> Any:
        await self.prefill.tell(grant_order(request_id, block_ids))
        return (await self.reports["p"].one(LeaseGranted, request_id)).ticket

    def check(self) -> None:
        for actor in self.actors.values():
            actor.endpoint.check()


async def test_the_hand_over() -> None:
    async with ActorSystem() as system:
        pair = Pair("a")
        await pair.start(system)
        ticket = await pair.ticket("r", [3, 4, 9])
        assert (ticket.engine_id, ticket.epoch, ticket.num_tokens, ticket.transport) == (
            "engine-p",
            1,
            48,
            "in_process",
        )
        await pair.decode.tell(HoldTicket("r", ticket))
        order = LoadBlocks("r", 1, ticket, 0, int32([10, 20, 30]), 5.0)
        await pair.decode.tell(order)
        await pair.decode.tell(order)  # twice: counted and ignored
        landed = await pair.reports["d"].one(BlocksLanded, "r")
        assert landed.num_bytes == 3 * LAYOUT.block_bytes
        assert np.array_equal(pair.blocks("d")[[10, 20, 30]], pair.blocks("p")[[3, 4, 9]])
        await pair.reports["p"].one(BlocksSent, "r")
        assert [type(report) for report in pair.reports["d"].all] == [BlocksLanded]
        assert [type(report) for report in pair.reports["p"].all] == [LeaseGranted, BlocksSent]
        assert pair.actors["d"].endpoint.reader.duplicates == 1
        pair.check()


async def test_every_promise_of_the_lending_side_has_its_refusal() -> None:
    async with ActorSystem() as system:
        pair = Pair("a", lease_s=0.05)
        await pair.start(system)
        for request_id, block_ids in (("none", []), ("outside", [BLOCKS]), ("below", [-1])):
            await pair.prefill.tell(grant_order(request_id, block_ids))
            await pair.reports["p"].one(LeaseDenied, request_id)
        await pair.ticket("expires", [1])
        await pair.reports["p"].one(LeaseExpired, "expires")
        ticket = await pair.ticket("revoked", [1])
        await pair.prefill.tell(RevokeLease("revoked", 1))
        await pair.reports["p"].one(LeaseExpired, "revoked")
        await pair.decode.tell(LoadBlocks("revoked", 1, ticket, 0, int32([1]), 5.0))
        assert (await pair.reports["d"].one(TransferFailed, "revoked")).reason == "expired"


async def test_a_lease_that_expires_between_read_and_release_never_lands() -> None:
    """aws-do-eks#84: the blocks were used again while they were read, and the answer was 200."""
    async with ActorSystem() as system:
        pair = Pair("a", fault="stall:1,stall_s:0.1", lease_s=30.0)
        await pair.start(system)
        ticket = await pair.ticket("r", [1, 2])
        await pair.decode.tell(LoadBlocks("r", 1, ticket, 0, int32([1, 2]), 5.0))
        await pair.prefill.tell(RevokeLease("r", 1))
        assert (await pair.reports["d"].one(TransferFailed, "r")).reason == "expired"


async def test_a_read_that_cannot_be_stopped_is_quarantined_and_its_quiet_is_told() -> None:
    async with ActorSystem() as system:
        pair = Pair("a", fault="stall:1,stall_s:0.3")
        await pair.start(system)
        ticket = await pair.ticket("r", [1, 2])
        await pair.decode.tell(LoadBlocks("r", 1, ticket, 0, int32([1, 2]), 0.05))
        failed = await pair.reports["d"].one(TransferFailed, "r")
        assert (failed.reason, failed.quarantined) == ("deadline", True)
        await pair.reports["d"].one(BlocksQuiet, "r")
        await pair.reports["p"].one(BlocksSent, "r")


async def test_the_end_of_a_peer_is_told_once_and_fails_its_loads() -> None:
    async with ActorSystem() as system:
        pair = Pair("a", fault="stall:1,stall_s:0.01")
        await pair.start(system)
        ticket = await pair.ticket("r", [1, 2])
        await pair.decode.tell(LoadBlocks("r", 1, ticket, 0, int32([1, 2]), 5.0))
        await pair.ticket("later", [3])
        pair.neighbourhood.kill(ticket.port)
        assert (await pair.reports["d"].one(TransferFailed, "r")).reason == "peer_lost"
        lost = [report for report in pair.reports["d"].all if isinstance(report, PeerLost)]
        assert [(report.engine_id, report.epoch) for report in lost] == [("engine-p", 1)]


async def test_a_bad_fault_and_a_bad_pool_are_configuration_errors() -> None:
    for text, says in (("smoke:1", "smoke"), ("drop", "NAME:NUMBER"), ("drop:2", "between 0 and 1")):
        with pytest.raises(ConfigurationError, match=says):
            Pair("a", fault=text)


async def one_seed(system: ActorSystem, seed: int) -> dict[str, int]:
    """A few requests with everything that can go wrong, at random. Returns how their loads ended."""
    choose = random.Random(seed)
    kinds = ("drop", "delay", "duplicate", "reorder", "death", "corrupt", "stall")
    parts = [f"{kind}:{choose.choice((0, 0, 0, 0.1, 0.3)):g}" for kind in kinds]
    pair = Pair(f"s{seed}", fault=",".join([*parts, "delay_s:0.01", "stall_s:0.1", f"seed:{seed}"]), lease_s=0.25)
    await pair.start(system)
    originals = pair.blocks("p").copy()
    orders: dict[str, list[int]] = {}
    ended: dict[str, int] = {}
    rows = iter(range(0, BLOCKS - 4, 4))
    for number, first in zip(range(choose.randint(1, 4)), rows, strict=False):
        request_id, blocks = f"r{number}", list(range(first, first + choose.randint(1, 4)))
        ticket = await pair.ticket(request_id, blocks)
        if choose.random() < 0.7:
            await pair.decode.tell(HoldTicket(request_id, ticket))
        if choose.random() < 0.1:
            await pair.decode.tell(ReleaseTicket(request_id, ticket))
        if choose.random() < 0.1:
            await pair.prefill.tell(RevokeLease(request_id, 1))
        order = LoadBlocks(request_id, 1, ticket, 0, int32(blocks), choose.choice((0.05, 0.3, 0.8)))
        orders[request_id] = blocks
        await pair.decode.tell(order)
        if choose.random() < 0.2:
            await pair.decode.tell(order)
        if choose.random() < 0.2:
            await pair.decode.tell(CancelLoad(request_id, 1))

    def all_over() -> bool:
        """Every load has its report, every quarantine its quiet, every lease its end (and its blocks get re-used)."""
        for report in pair.reports["p"].all:
            if isinstance(report, BlocksSent | LeaseExpired):
                pair.blocks("p")[orders[report.request_id]] = 0xEE
        quiet = [r.request_id for r in pair.reports["d"].all if isinstance(r, BlocksQuiet)]
        reports = [r for r in pair.reports["d"].all if isinstance(r, BlocksLanded | TransferFailed)]
        awaited = [r.request_id for r in reports if isinstance(r, TransferFailed) and r.quarantined]
        ends = [r for r in pair.reports["p"].all if isinstance(r, BlocksSent | LeaseExpired)]
        return len(reports) >= len(orders) and len(ends) >= len(orders) and sorted(quiet) == sorted(awaited)

    await pair.news.until(all_over)
    for address in (pair.decode, pair.prefill):
        await system.stop(address, 1.0)
    for request_id, blocks in orders.items():
        mine = [r for r in pair.reports["d"].all if getattr(r, "request_id", "") == request_id]
        finals = [r for r in mine if not isinstance(r, BlocksQuiet)]
        assert len(finals) == 1, (seed, mine)
        ends = [r for r in pair.reports["p"].all if getattr(r, "request_id", "") == request_id]
        assert type(ends[0]) is LeaseGranted
        assert len(ends) == 2, (seed, ends)
        final = finals[0]
        if isinstance(final, BlocksLanded):
            assert np.array_equal(pair.blocks("d")[blocks], originals[blocks]), (seed, "landed with foreign bytes")
            assert isinstance(ends[1], BlocksSent), (seed, ends)
        name = final.reason if isinstance(final, TransferFailed) else "landed"
        ended[name] = ended.get(name, 0) + 1
    pair.check()
    return ended


async def test_500_seeds_of_faults_end_every_order_in_exactly_one_report() -> None:
    counts: dict[str, int] = {}
    for batch in (range(start, start + 50) for start in range(0, 500, 50)):
        async with ActorSystem() as system, anyio.create_task_group() as tasks:

            async def run(seed: int, system: ActorSystem = system) -> None:
                for name, count in (await one_seed(system, seed)).items():
                    counts[name] = counts.get(name, 0) + count

            for seed in batch:
                tasks.start_soon(run, seed)
        assert system.failure is None
    # The faults did strike, and a good part of the loads got through them.
    assert {"landed", "checksum", "deadline", "cancelled", "peer_lost", "expired"} <= counts.keys(), counts
    assert counts["landed"] > 50, counts
