"""Who holds blocks, in which state, and that a grant ends once."""

from __future__ import annotations

import pytest

from actors.scheduling.block_pool import BlockPool
from actors.scheduling.grants import DoubleRelease, GrantLedger, GrantState
from actors.scheduling.prefix_cache import PrefixCache


def ledger_of(usable_blocks: int) -> tuple[GrantLedger, BlockPool]:
    pool = BlockPool(usable_blocks, PrefixCache())
    return GrantLedger(pool), pool


def test_a_second_release_raises_and_frees_nothing() -> None:
    ledger, pool = ledger_of(4)
    grant = ledger.open("a", pool.take(2), 0.0)
    ledger.release(grant)
    assert list(pool.free_blocks()) == [2, 1, 3, 4], "tail first, to the head"
    with pytest.raises(DoubleRelease, match="grant 1 of request 'a' was released already"):
        ledger.release(grant)
    assert pool.num_free == 4


def test_generations_are_never_used_again() -> None:
    ledger, pool = ledger_of(4)
    first = ledger.open("a", pool.take(1), 0.0)
    ledger.release(first)
    assert ledger.open("a", pool.take(1), 1.0).generation == first.generation + 1


def test_a_block_counts_in_the_strongest_state_of_its_grants() -> None:
    ledger, pool = ledger_of(6)
    shared = pool.take(2)
    leased = ledger.open("a", shared, 0.0)
    pool.touch(shared)
    ledger.open("b", [*shared, *pool.take(1)], 0.0)
    ledger.turn(leased, GrantState.LEASED, 0.0, "waits for its reader")
    assert ledger.count() == {
        GrantState.QUARANTINED: 0,
        GrantState.LEASED: 2,
        GrantState.FENCED: 0,
        GrantState.HELD: 1,
    }
    ledger.release(leased)
    assert ledger.count()[GrantState.LEASED] == 0
    assert ledger.count()[GrantState.HELD] == 3, "b still holds all three"


def test_a_fence_is_lifted_when_its_step_has_returned() -> None:
    ledger, pool = ledger_of(3)
    grant = ledger.open("a", pool.take(2), 0.0)
    ledger.turn(grant, GrantState.FENCED, 0.0, "step 7 is in flight", 7)
    assert ledger.num_coming_back() == 2
    ledger.lift_fences({7})
    assert pool.num_free == 1
    ledger.lift_fences({8})
    assert pool.num_free == 3


def test_a_split_moves_blocks_without_freeing_them() -> None:
    ledger, pool = ledger_of(5)
    grant = ledger.open("a", pool.take(3), 0.0)
    head = ledger.split(grant, 1, 2.0, move_head=True)
    assert (head.block_ids, grant.block_ids, pool.num_free) == ([1], [2, 3], 2)
    ledger.release(grant)
    assert list(pool.free_blocks()) == [3, 2, 4, 5]
