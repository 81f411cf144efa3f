"""Seeded faults around any network and transport: `FaultPlan.parse("corrupt:0.5,drop:0.1,seed:7")`.

    drop:P       a control message is lost on its way there or back
    delay:P      … comes late, by up to delay_s
    duplicate:P  … is delivered twice
    reorder:P    … lets those behind it pass first
    death:P      the link to the peer breaks before a control message
    corrupt:P    one bit of a READ is wrong when it lands
    stall:P      a READ neither ends nor can be stopped until stall_s have passed
    slow:P       a READ goes in up to SLOW_PARTS parts with equal pauses behind them, slow_s in all

P is a probability from 0 to 1; delay_s, stall_s, slow_s and the seed are numbers. One plan is one stream of decisions:
the same seed and the same order of events give the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.messages.errors import ConfigurationError
from actors.messages.lease import ControlReply, ControlRequest
from connectors.memory import KVMemory
from connectors.transports.face import (
    ControlLink,
    ControlNetwork,
    Landed,
    LeaseService,
    LinkLost,
    PeerKey,
    ReadFailed,
    Reading,
    ReadOrder,
    ReadState,
    Transport,
)

REORDER_S = 0.005
SLOW_PARTS = 16


class FaultPlan(msgspec.Struct, frozen=True):
    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    stall: float = 0.0
    death: float = 0.0
    slow: float = 0.0
    delay_s: float = 0.05
    stall_s: float = 1.0
    slow_s: float = 1.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Raises ConfigurationError that names what is accepted."""
        try:
            pairs = dict(part.strip().split(":") for part in text.split(","))
            plan = msgspec.convert(pairs, cls, strict=False)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigurationError(f"--fault {text!r}: {error}; write NAME:NUMBER,…") from error
        unknown = pairs.keys() - set(cls.__struct_fields__)
        if unknown:
            names = ", ".join(cls.__struct_fields__)
            raise ConfigurationError(f"--fault {text!r}: no fault is called {sorted(unknown)[0]!r}; there are {names}")
        if not all(0 <= getattr(plan, name) <= 1 for name in cls.__struct_fields__[:8]):
            raise ConfigurationError(f"--fault {text!r}: a probability lies between 0 and 1")
        return plan


class Faults:
    """The plan with its stream of decisions, shared by the network and the transports of one endpoint."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._random = random.Random(plan.seed)
        self.injected: dict[str, int] = {}

    def strikes(self, fault: str) -> bool:
        hit = bool(self._random.random() < getattr(self.plan, fault))
        if hit:
            self.injected[fault] = self.injected.get(fault, 0) + 1
        return hit

    def below(self, limit: int) -> int:
        return self._random.randrange(limit)

    def some_delay(self) -> float:
        return self._random.random() * self.plan.delay_s


class FaultyLink:
    def __init__(self, inner: ControlLink, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    @property
    def lost(self) -> str | None:
        return self._inner.lost

    async def ask(self, request: ControlRequest) -> ControlReply:
        faults = self._faults
        if faults.strikes("death"):
            self._inner.close("fault: death")
        if faults.strikes("delay"):
            await anyio.sleep(faults.some_delay())
        if faults.strikes("reorder"):
            await anyio.sleep(REORDER_S)
        if faults.strikes("drop"):
            await self._until_lost()
        reply = await self._inner.ask(request)
        if faults.strikes("duplicate"):
            await self._inner.ask(request)
        if faults.strikes("drop"):
            await self._until_lost()
        if faults.strikes("delay"):
            await anyio.sleep(faults.some_delay())
        return reply

    async def _until_lost(self) -> None:
        """The asker hears nothing, until it gives up or the link ends."""
        lost = anyio.Event()
        take_back = self._inner.on_lost(lost.set)
        try:
            await lost.wait()
        finally:
            take_back()
        raise LinkLost(self._inner.lost or "fault: drop")

    def on_lost(self, call: Callable[[], None]) -> Callable[[], None]:
        return self._inner.on_lost(call)

    def close(self, reason: str) -> None:
        self._inner.close(reason)


class FaultyNetwork:
    def __init__(self, inner: ControlNetwork, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    async def listen(self, service: LeaseService, host: str, port: int, tasks: TaskGroup) -> int:
        return await self._inner.listen(service, host, port, tasks)

    async def connect(self, host: str, port: int) -> ControlLink:
        return FaultyLink(await self._inner.connect(host, port), self._faults)


class StalledReading(ReadState):
    """In flight whatever one does, like a one-sided READ from a stopped peer; then it does what it was to do."""

    def __init__(self) -> None:
        super().__init__(cancellable=False)

    def stop(self) -> None:
        pass


class SlowReading(ReadState):
    """A READ of its own for each part; between two of them it can be stopped whatever the transport."""

    def __init__(self) -> None:
        super().__init__(cancellable=True)
        self.part: Reading | None = None
        self.stopped = anyio.Event()

    def begin(self, part: Reading) -> None:
        self.part, self.cancellable = part, part.cancellable

    def stop(self) -> None:
        self.stopped.set()
        if self.part is not None:
            self.part.stop()


class FaultyTransport:
    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self.name = inner.name

    @property
    def agent_metadata(self) -> bytes:
        return self._inner.agent_metadata

    async def start(self, memory: KVMemory, tasks: TaskGroup) -> None:
        self._memory, self._tasks = memory, tasks
        await self._inner.start(memory, tasks)

    def read(self, order: ReadOrder, landed: Landed) -> Reading:
        if self._faults.strikes("corrupt"):
            landed = self._corrupting(order, landed)
        if self._faults.strikes("stall"):
            stalled = StalledReading()
            self._tasks.start_soon(self._stall, order, landed, stalled)
            return stalled
        if self._faults.strikes("slow"):
            slow = SlowReading()
            self._tasks.start_soon(self._slow, order, landed, slow)
            return slow
        return self._inner.read(order, landed)

    def _corrupting(self, order: ReadOrder, landed: Landed) -> Landed:
        position, bit = self._faults.below(order.targets.size), self._faults.below(8)
        offset = self._faults.below(self._memory.block_bytes)

        def corrupted(first: int, last: int) -> None:
            if first <= position < last:
                self._memory.block(int(order.targets[position]))[offset] ^= 1 << bit
            landed(first, last)

        return corrupted

    async def _stall(self, order: ReadOrder, landed: Landed, reading: StalledReading) -> None:
        await anyio.sleep(self._faults.plan.stall_s)
        inner, failure = self._inner.read(order, landed), None
        try:
            await inner.finished()
        except ReadFailed as error:
            failure = error.detail
        await inner.wait_quiet()
        reading.end(failure)

    async def _slow(self, order: ReadOrder, landed: Landed, reading: SlowReading) -> None:
        starts = range(0, order.targets.size, -(-order.targets.size // SLOW_PARTS))
        failure: str | None = None
        for first in starts:
            part = self._inner.read(_part(order, first, first + starts.step), _shifted(landed, first))
            reading.begin(part)
            try:
                await part.finished()
            except ReadFailed as error:
                failure = error.detail
            await part.wait_quiet()
            with anyio.move_on_after(self._faults.plan.slow_s / len(starts)):
                await reading.stopped.wait()
                failure = failure or "stopped"
            if failure is not None:
                break
        reading.end(failure)

    def forget(self, peer: PeerKey) -> None:
        self._inner.forget(peer)

    async def stop(self) -> None:
        await self._inner.stop()


def _part(order: ReadOrder, first: int, last: int) -> ReadOrder:
    return msgspec.structs.replace(
        order, indexes=order.indexes[first:last], sources=order.sources[first:last], targets=order.targets[first:last]
    )


def _shifted(landed: Landed, by: int) -> Landed:
    return lambda first, last: landed(by + first, by + last)
