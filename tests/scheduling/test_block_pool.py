"""Free-list order, counted by hand from the rule: unknown blocks come back to the head, cached ones to the tail."""

from __future__ import annotations

import pytest

from actors.scheduling.block_pool import BlockPool
from actors.scheduling.prefix_cache import ROOT, PrefixCache


def pool_of(usable_blocks: int) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(usable_blocks, cache), cache


def test_blocks_come_in_id_order_and_never_the_null_block() -> None:
    pool, _ = pool_of(4)
    assert pool.take(3) == [1, 2, 3]
    assert (pool.num_free, list(pool.free_blocks())) == (1, [4])
    assert pool.take(1) == [4]
    assert (pool.num_free, list(pool.free_blocks())) == (0, [])


def test_taking_more_than_there_are_changes_nothing() -> None:
    pool, _ = pool_of(2)
    with pytest.raises(ValueError, match="3 blocks asked, 2 free"):
        pool.take(3)
    assert list(pool.free_blocks()) == [1, 2]


def test_unknown_blocks_go_to_the_head_and_cached_ones_to_the_tail_in_the_order_given() -> None:
    pool, cache = pool_of(6)
    blocks = pool.take(4)
    parent = cache.register(blocks[0], ROOT, None, (1,))
    cache.register(blocks[1], parent, None, (2,))
    pool.give(reversed(blocks))  # 4 and 3 are unknown; 2, then 1, are cached
    assert list(pool.free_blocks()) == [4, 3, 5, 6, 2, 1]


def test_a_cached_block_is_free_until_touched_and_forgotten_when_taken() -> None:
    pool, cache = pool_of(3)
    (block,) = pool.take(1)
    cache.register(block, ROOT, None, (1,))
    pool.give([block])
    assert list(pool.free_blocks()) == [2, 3, 1]
    pool.touch([1])
    pool.touch([1])
    assert (list(pool.free_blocks()), pool.ref_counts[1]) == ([2, 3], 2)
    pool.give([1])
    assert pool.num_free == 2, "somebody still holds it"
    pool.give([1])
    assert cache.find(ROOT, None, (1,)) is not None
    assert pool.take(3) == [2, 3, 1]
    assert cache.find(ROOT, None, (1,)) is None
