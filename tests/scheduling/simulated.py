"""A worker and a TransferActor made of dictionaries, which prove that every plan reads the right KV.

The KV of a token is modelled as the tuple of all tokens up to it, behind whatever else it depends on (adapter, salt,
encoder items): exactly what attention makes of it. A step runs when its result is asked for, in planning order, so that
loads and re-used blocks can get in its way if the core lets them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from actors.messages.lease import Ticket, prompt_digest
from actors.messages.plan import StepPlan, StepResult
from actors.messages.request import EngineRequest
from actors.messages.transfer import (
    BlocksLanded,
    BlocksQuiet,
    BlocksSent,
    CancelLoad,
    GrantLease,
    HoldTicket,
    LeaseDenied,
    LeaseExpired,
    LeaseGranted,
    LoadBlocks,
    PeerLost,
    ReleaseTicket,
    RevokeLease,
    TransferFailed,
    TransferOrder,
    TransferReport,
)
from actors.scheduling.orders import int32

GARBAGE = ("garbage",)  # nobody may read it
BAD = ("bad",)  # a load of the step did not bring it, as the step's result says: whoever reads it computes more of it
BAD_TOKEN = -666  # drawn from BAD: the core may not publish it
Slots = dict[tuple[int, int], tuple[object, ...]]


def ints(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()


def plain(request_id: str, position: int) -> tuple[object, ...]:
    return ()


class InStepLoad(NamedTuple):
    """Positions [start, end) are brought by the step itself before it computes, but for the blocks `bad`."""

    request_id: str
    start: int
    end: int
    bad: tuple[int, ...]  # indexes into the block table


class SimulatedWorker:
    """A row that may sample several tokens has drafts: some of them are accepted, and their number is drawn.

    With async scheduling its plan counts drafts of steps before as accepted; like a device, the worker knows better.
    """

    def __init__(
        self,
        block_size: int,
        memory: Slots,
        sample: Callable[[], int],
        accept: Callable[[int], int] = lambda num_drafts: num_drafts,
        depends_on: Callable[[str, int], tuple[object, ...]] = plain,
    ) -> None:
        """`depends_on`: request id and position → what the KV at the position depends on besides the tokens."""
        self.block_size = block_size
        self.memory = memory
        self._sample, self._accept, self._depends_on = sample, accept, depends_on
        self.is_strict = True  # every position that is read must hold the KV of its token
        self.plans: deque[StepPlan] = deque()
        self.loads: dict[int, list[InStepLoad]] = {}  # step -> what it loads
        self.known: dict[int, dict[str, int]] = {}  # step -> request whose tokens were taken back -> how many it has
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}

    def run_oldest(self) -> StepResult:
        plan = self.plans.popleft()
        for request_id in plan.dropped_request_ids:
            self.tokens.pop(request_id, None)
            self.blocks.pop(request_id, None)
        for new in plan.new_requests:
            self.tokens[new.request_id] = ints(new.token_ids)
            self.blocks[new.request_id] = []
        for request_id, number in self.known.pop(plan.step, {}).items():
            del self.tokens[request_id][number:]
        columns = zip(
            plan.request_ids,
            ints(plan.num_scheduled_tokens),
            ints(plan.num_computed_tokens),
            ints(plan.num_sampled),
            ints(plan.num_new_blocks),
            strict=True,
        )
        new_blocks = ints(plan.new_block_ids)
        sampled: list[int] = []
        num_tokens: list[int] = []
        rows = []
        for request_id, count, computed, num_sampled, num_new in columns:
            assert count >= 1
            self.blocks[request_id] += new_blocks[:num_new]
            del new_blocks[:num_new]
            rows.append((request_id, computed, count, num_sampled))
        for load in self.loads.pop(plan.step, ()):
            self._load(load)
        for request_id, computed, count, num_sampled in rows:
            row = self._run_row(request_id, computed, count, num_sampled)
            sampled += row
            num_tokens.append(len(row))
        assert new_blocks == []
        return StepResult(plan.step, int32(num_tokens), int32(sampled))

    def _load(self, load: InStepLoad) -> None:
        tokens, blocks = self.tokens[load.request_id], self.blocks[load.request_id]
        for position in range(load.start, load.end):
            is_bad = position // self.block_size in load.bad
            self.memory[self._slot(blocks, position)] = BAD if is_bad else self._kv(load.request_id, tokens, position)

    def _run_row(self, request_id: str, computed: int, count: int, num_sampled: int) -> list[int]:
        tokens, blocks = self.tokens[request_id], self.blocks[request_id]
        assert 0 not in blocks, "the null block is read"
        if num_sampled:
            computed = min(computed, len(tokens) - 1)
        num_drafts = max(min(num_sampled, count) - 1, 0)  # with `trim_padding` they are as many as said
        drafts = [self._sample() for _ in range(num_drafts)]
        assert computed + count <= len(tokens) + num_drafts, f"{request_id}: tokens scheduled that nobody knows"
        is_bad = False
        for position in range(computed):
            found = self.memory.get(self._slot(blocks, position))
            is_bad |= found == BAD
            if self.is_strict and not is_bad:
                assert found == self._kv(request_id, tokens, position), f"{request_id}: wrong KV at {position}: {found}"
        computing = [*tokens, *drafts]
        for position in range(computed, computed + count):
            kv = BAD if is_bad else self._kv(request_id, computing, position)
            self.memory[self._slot(blocks, position)] = kv
        if not num_sampled:
            return []
        # The last known token was computed: only then is there a next one.
        assert computed + count == len(tokens) + num_drafts
        new = [*drafts[: self._accept(num_drafts)], self._sample()]
        if is_bad:
            new = [BAD_TOKEN] * len(new)
        tokens += new
        return new

    def _kv(self, request_id: str, tokens: list[int], position: int) -> tuple[object, ...]:
        return (*self._depends_on(request_id, position), *tokens[: position + 1])

    def _slot(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size


class SimulatedTransfers:
    """Holds the reports that are due until a test delivers them, in any order, again, or late."""

    def __init__(self, block_size: int, memory: Slots, rng: random.Random) -> None:
        self.block_size = block_size
        self.memory = memory
        self.rng = rng
        self.prompts: dict[int, tuple[int, ...]] = {}  # lease id of a ticket -> the tokens it stands for
        self.due: list[TransferReport] = []
        self.delivered: list[TransferReport] = []
        self.writing: dict[int, LoadBlocks] = {}  # generation -> a load whose bytes may still land
        self.reading: dict[int, GrantLease] = {}
        self.held: set[int] = set()  # lease ids with a HoldTicket and no end yet
        self.ended: list[int] = []  # lease ids whose obligation was handed over or discharged
        self.prompt_of: dict[str, tuple[int, ...]] = {}

    def ticket(self, tokens: tuple[int, ...], lease_id: int) -> Ticket:
        self.prompts[lease_id] = tokens
        return Ticket("prefill-0", 1, "127.0.0.1", 1, lease_id, b"c" * 16, len(tokens), prompt_digest(tokens))

    def note(self, request: EngineRequest) -> None:
        self.prompt_of[request.request_id] = request.prompt_token_ids

    def take(self, order: TransferOrder) -> None:
        rng, request_id = self.rng, order.request_id
        match order:
            case HoldTicket():
                self.held.add(order.ticket.lease_id)
            case ReleaseTicket():
                self._end(order.ticket.lease_id)
            case LoadBlocks():
                self._end(order.ticket.lease_id)
                self.writing[order.generation] = order
                outcome = rng.choice(["landed", "landed", "failed", "quarantined"])
                if outcome == "landed":
                    self.due.append(BlocksLanded(request_id, order.generation))
                else:
                    quarantined = outcome == "quarantined"
                    self.due.append(TransferFailed(request_id, order.generation, "checksum", quarantined=quarantined))
                    if quarantined:
                        self.due.append(BlocksQuiet(request_id, order.generation))
            case CancelLoad():
                assert order.generation in self.writing, "a load was cancelled that has ended"
            case GrantLease():
                self.reading[order.generation] = order
                self._check_leased(order)
                if rng.random() < 0.2:
                    self.due.append(LeaseDenied(request_id, order.generation, "over budget"))
                else:
                    ticket = self.ticket(self.prompt_of[request_id], 1_000_000 + order.generation)
                    self.due.append(LeaseGranted(request_id, order.generation, ticket))
                    end = BlocksSent if rng.random() < 0.5 else LeaseExpired
                    self.due.append(end(request_id, order.generation))
            case RevokeLease():
                pass  # ends in the LeaseExpired (or BlocksSent) that is due already

    def _end(self, lease_id: int) -> None:
        assert lease_id in self.held, "an obligation that was never taken on, or discharged before"
        self.held.remove(lease_id)
        self.ended.append(lease_id)

    def deliver(self, place: int) -> TransferReport:
        """What happens to the memory, and the report of it."""
        report = self.due.pop(place)
        match report:
            case BlocksLanded():
                order = self.writing.pop(report.generation)
                self._land(order)
            case TransferFailed():
                self._garble(report.generation)
                follows = BlocksQuiet(report.request_id, report.generation)
                if not (report.quarantined and follows in self.due):
                    self.writing.pop(report.generation)
            case BlocksQuiet():
                self._garble(report.generation)
                if any(
                    isinstance(other, TransferFailed) and other.generation == report.generation
                    for other in self.delivered
                ):
                    self.writing.pop(report.generation)
            case BlocksSent() | LeaseExpired():
                self._check_leased(self.reading.pop(report.generation))
            case LeaseDenied():
                self.reading.pop(report.generation)
        self.delivered.append(report)
        return report

    def lose(self, place: int) -> int:
        """Its generation: what the report would have freed is never free again."""
        report = self.due.pop(place)
        assert not isinstance(report, PeerLost)
        return report.generation

    def write_something(self) -> None:
        """Bytes of loads under way land at any time: whoever owns these blocks meanwhile is wrong."""
        for generation in self.writing:
            self._garble(generation)

    def _garble(self, generation: int) -> None:
        for block in ints(self.writing[generation].block_ids):
            for offset in range(self.block_size):
                self.memory[block, offset] = GARBAGE

    def _land(self, order: LoadBlocks) -> None:
        tokens = self.prompts[order.ticket.lease_id]
        for place, block in enumerate(ints(order.block_ids)):
            for offset in range(self.block_size):
                position = (order.first_block + place) * self.block_size + offset
                known = position < order.ticket.num_tokens
                self.memory[block, offset] = tokens[: position + 1] if known else GARBAGE

    def _check_leased(self, order: GrantLease) -> None:
        tokens = self.prompt_of[order.request_id]
        blocks = ints(order.block_ids)
        assert order.num_tokens == len(tokens)
        assert order.prompt_digest == prompt_digest(tokens)
        assert len(blocks) == -(-len(tokens) // self.block_size)
        for position in range(len(tokens)):
            slot = blocks[position // self.block_size], position % self.block_size
            assert self.memory.get(slot) == tokens[: position + 1], "a leased block holds something else"
