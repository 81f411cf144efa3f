"""Which blocks each request took and gave back between two looks at the grants. Invariant: `num_used` is what is not
free of the pool.

A grant's list only grows at its end, or is replaced as a whole (a split), so a look costs one comparison per grant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from actors.scheduling.grants import Grant, GrantState

Blocks = tuple[str, Sequence[int]]  # of one request


class BlockChange:
    __slots__ = ("allocated", "freed", "kept", "shared", "turned")

    def __init__(self) -> None:
        self.allocated = self.shared = self.freed = self.kept = 0
        self.turned: list[str] = []  # grants that became fenced, leased, quarantined


class _Known:
    __slots__ = ("block_ids", "length", "request_id", "state")

    def __init__(self, grant: Grant) -> None:
        self.request_id, self.state = grant.request_id, grant.state
        self.block_ids, self.length = grant.block_ids, len(grant.block_ids)

    @property
    def blocks(self) -> Sequence[int]:
        return self.block_ids[: self.length]


class BlockWatch:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._counts: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        return len(self._counts)

    def look(self, grants: Mapping[int, Grant]) -> dict[str, BlockChange]:
        """What changed since the last look, by request id."""
        known = self._known
        gone = [generation for generation in known if generation not in grants]
        grown: list[Blocks] = []
        lost: list[Blocks] = []
        moved: set[str] = set()  # requests whose grants were split: what only changes hands is no change
        changes: dict[str, BlockChange] = {}
        for generation in gone:
            old = known.pop(generation)
            lost.append((old.request_id, old.blocks))
            passing = len(old.block_ids) - old.length
            if passing > 0:  # taken for a row that a preemption then took away, within one call
                change = changes.setdefault(old.request_id, BlockChange())
                change.allocated += passing
                change.freed += passing
        for generation, grant in grants.items():
            before = known.get(generation)
            if before is not None and before.block_ids is grant.block_ids and before.state is grant.state:
                if before.length != len(grant.block_ids):
                    grown.append((grant.request_id, grant.block_ids[before.length :]))
                    before.length = len(grant.block_ids)
                continue
            if before is None or before.state is not grant.state:
                self._turned(changes, grant)
            if before is not None and before.block_ids is not grant.block_ids:
                moved.add(grant.request_id)
                lost.append((grant.request_id, before.blocks))
            start = before.length if before is not None and before.block_ids is grant.block_ids else 0
            grown.append((grant.request_id, grant.block_ids[start:]))
            known[generation] = _Known(grant)
        if moved:
            lost, grown = _without_moves(lost, grown, moved)
        for request_id, blocks in lost:
            self._lose(changes.setdefault(request_id, BlockChange()), blocks)
        for request_id, blocks in grown:
            if blocks:
                self._take(changes.setdefault(request_id, BlockChange()), blocks)
        return changes

    def held(self) -> dict[str, int]:
        """References by request id."""
        totals: dict[str, int] = {}
        for grant in self._known.values():
            totals[grant.request_id] = totals.get(grant.request_id, 0) + grant.length
        return totals

    def _turned(self, changes: dict[str, BlockChange], grant: Grant) -> None:
        if grant.state is not GrantState.HELD:
            change = changes.setdefault(grant.request_id, BlockChange())
            number = len(grant.block_ids)
            until = f" until step {grant.fence_step} is back" if grant.state is GrantState.FENCED else ""
            change.turned.append(f"{number} block{'s' * (number != 1)} {grant.state.name.lower()}{until}")

    def _lose(self, change: BlockChange, blocks: Sequence[int]) -> None:
        counts = self._counts
        change.freed += len(blocks)
        for block in blocks:
            if counts[block] == 1:
                del counts[block]
            else:
                counts[block] -= 1
                change.kept += 1

    def _take(self, change: BlockChange, blocks: Sequence[int]) -> None:
        counts = self._counts
        change.allocated += len(blocks)
        for block in blocks:
            if block in counts:
                counts[block] += 1
                change.shared += 1
            else:
                counts[block] = 1


def _without_moves(lost: list[Blocks], grown: list[Blocks], moved: set[str]) -> tuple[list[Blocks], list[Blocks]]:
    """A split moves blocks from one grant of a request to another: neither taken nor given back."""
    others_lost = [part for part in lost if part[0] not in moved]
    others_grown = [part for part in grown if part[0] not in moved]
    for request_id in sorted(moved):
        had = Counter(block for owner, blocks in lost if owner == request_id for block in blocks)
        has = Counter(block for owner, blocks in grown if owner == request_id for block in blocks)
        others_lost.append((request_id, list((had - has).elements())))
        others_grown.append((request_id, list((has - had).elements())))
    return others_lost, others_grown
