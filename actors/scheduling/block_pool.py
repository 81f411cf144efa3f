"""The KV blocks: reference counts and the list of free ones. Block 0 is the null block and never handed out.

A block that nobody holds is free even while the prefix cache knows it; taking it evicts it. Blocks come from the head
of the list. A block that comes back goes to the head if the cache does not know it, else to the tail, so the list is
the cache's LRU order. Invariant: a usable block is in the list exactly when its reference count is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actors.scheduling.prefix_cache import PrefixCache


class BlockPool:
    def __init__(self, usable_blocks: int, cache: PrefixCache) -> None:
        self.usable_blocks = usable_blocks
        self.num_free = usable_blocks
        self.ref_counts = [0] * (usable_blocks + 1)
        self._cache = cache
        # A ring through both arrays; 0 is its end, so 0's successor is the head and its predecessor the tail.
        self._next = [*range(1, usable_blocks + 1), 0]
        self._previous = [usable_blocks, *range(usable_blocks)]

    def take(self, number: int) -> list[int]:
        """`number` blocks from the head, each with one reference. The caller has checked that there are enough."""
        if number > self.num_free:
            raise ValueError(f"{number} blocks asked, {self.num_free} free")
        following, known, counts = self._next, self._cache.entry_of, self.ref_counts
        taken = []
        block = following[0]
        for _ in range(number):
            if block in known:
                self._cache.forget(block)
            counts[block] = 1
            taken.append(block)
            block = following[block]
        following[0] = block
        self._previous[block] = 0
        self.num_free -= number
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference for each."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._unlink(block)
            self.ref_counts[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """One reference less for each, in this order; tail blocks first, so that a prefix outlives what follows it."""
        forgotten = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._cache.entry_of:
                    self._link(self._previous[0], block)
                else:
                    forgotten.append(block)
        after = 0
        for block in forgotten:
            self._link(after, block)
            after = block

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def free_blocks(self) -> Iterator[int]:
        """Head first. For checks and tests."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self.num_free += 1
