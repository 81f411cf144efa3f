"""Every hold on KV blocks, with its owner and state: the one way in and the one way out.

    HELD ──> FENCED (a dispatched step still touches the blocks) ──┐
      ├────> LEASED (kept for a remote reader) ────────────────────┼──> released, once
      └────> QUARANTINED (remote bytes may still land in them) ────┘

A grant's generation is unique in its engine, so a report about an older grant can never be taken for a newer one's.
Invariant: a block's reference count is the number of live grants that name it.
"""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum

from actors.messages.errors import KvyardError
from actors.scheduling.block_pool import BlockPool


class GrantState(IntEnum):
    """Stronger ones are larger: a block's state is the strongest of its grants."""

    HELD = 1
    FENCED = 2
    LEASED = 3
    QUARANTINED = 4


class DoubleRelease(KvyardError):
    """A grant of blocks was released twice: a bug that would hand one block to two requests."""

    def __init__(self, request_id: str, generation: int) -> None:
        self.request_id, self.generation = request_id, generation
        super().__init__(f"grant {generation} of request {request_id!r} was released already")


class Grant:
    __slots__ = ("block_ids", "fence_step", "generation", "reason", "request_id", "since", "state")

    def __init__(self, request_id: str, generation: int, block_ids: list[int], now: float) -> None:
        self.request_id = request_id
        self.generation = generation
        self.block_ids = block_ids
        self.state = GrantState.HELD
        self.since = now
        self.fence_step = 0
        self.reason = ""  # of a state other than HELD


class GrantLedger:
    def __init__(self, pool: BlockPool) -> None:
        self.live: dict[int, Grant] = {}
        self._pool = pool
        self._last_generation = 0
        self._fenced: list[Grant] = []
        self._counted: dict[GrantState, int] | None = None

    def open(self, request_id: str, block_ids: list[int], now: float) -> Grant:
        """The blocks' references are the grant's from here on."""
        self._last_generation += 1
        grant = Grant(request_id, self._last_generation, block_ids, now)
        self.live[grant.generation] = grant
        return grant

    def turn(self, grant: Grant, state: GrantState, now: float, reason: str, fence_step: int = 0) -> None:
        grant.state, grant.since, grant.reason, grant.fence_step = state, now, reason, fence_step
        if state is GrantState.FENCED:
            self._fenced.append(grant)
        self._counted = None

    def split(self, grant: Grant, at: int, now: float, *, move_head: bool) -> Grant:
        """A new grant takes over blocks [:at] (`move_head`) or [at:]; `grant` keeps the others and its generation."""
        head, tail = grant.block_ids[:at], grant.block_ids[at:]
        grant.block_ids = tail if move_head else head
        return self.open(grant.request_id, head if move_head else tail, now)

    def release(self, grant: Grant) -> None:
        """Raises DoubleRelease. Blocks that no other grant names are free, tail first."""
        if self.live.pop(grant.generation, None) is not grant:
            raise DoubleRelease(grant.request_id, grant.generation)
        if grant.state is not GrantState.HELD:
            self._counted = None
        self._pool.give(reversed(grant.block_ids))

    def lift_fences(self, steps_in_flight: Container[int]) -> None:
        """Release what waited for a step that has returned."""
        if not self._fenced:
            return
        waiting, self._fenced = self._fenced, []
        for grant in waiting:
            if grant.fence_step in steps_in_flight:
                self._fenced.append(grant)
            else:
                self.release(grant)

    def num_coming_back(self) -> int:
        """Blocks that will be free when the fences are lifted."""
        return sum(self._pool.ref_counts[block] == 1 for grant in self._fenced for block in grant.block_ids)

    def count(self) -> dict[GrantState, int]:
        """Blocks in each state. Only grants that are not HELD are looked at, and only after one of them changed."""
        if self._counted is None:
            seen: set[int] = set()
            self._counted = {}
            for state in (GrantState.QUARANTINED, GrantState.LEASED, GrantState.FENCED):
                before = len(seen)
                for grant in self.live.values():
                    if grant.state is state:
                        seen.update(grant.block_ids)
                self._counted[state] = len(seen) - before
        held = self._pool.usable_blocks - self._pool.num_free - sum(self._counted.values())
        return {**self._counted, GrantState.HELD: held}
