"""What a look at the grants makes of what happened to them, and in which step late blocks come back."""

from __future__ import annotations

from typing import Any

from actors.configuration import SchedulerConfiguration
from actors.messages.transfer import BlocksQuiet, LoadBlocks, TransferFailed
from actors.scheduling.block_pool import BlockPool
from actors.scheduling.grants import GrantLedger
from actors.scheduling.prefix_cache import PrefixCache
from tests.scheduling.builders import request_of, result_of, ticket_of
from tools.step_table.blocks import BlockChange, BlockWatch
from tools.step_table.collector import Collector
from tools.step_table.watched import WatchedCore


def numbers(change: BlockChange) -> tuple[int, int, int, int]:
    return change.allocated, change.shared, change.freed, change.kept


def test_takes_shares_and_gives_back() -> None:
    pool = BlockPool(8, PrefixCache())
    ledger, watch = GrantLedger(pool), BlockWatch()
    one = ledger.open("one", pool.take(3), 0.0)
    assert numbers(watch.look(ledger.live)["one"]) == (3, 0, 0, 0)
    assert watch.look(ledger.live) == {}
    pool.touch(one.block_ids[:2])
    ledger.open("two", [*one.block_ids[:2], *pool.take(1)], 0.0)
    one.block_ids += pool.take(1)
    seen = watch.look(ledger.live)
    assert (numbers(seen["two"]), numbers(seen["one"])) == ((3, 2, 0, 0), (1, 0, 0, 0))
    ledger.release(one)
    assert numbers(watch.look(ledger.live)["one"]) == (0, 0, 4, 2)  # two of the four stay with the other
    assert watch.num_used == 3 == pool.usable_blocks - pool.num_free


def test_a_split_moves_blocks_and_takes_none() -> None:
    pool = BlockPool(8, PrefixCache())
    ledger, watch = GrantLedger(pool), BlockWatch()
    grant = ledger.open("one", pool.take(5), 0.0)
    watch.look(ledger.live)
    rest = ledger.split(grant, 3, 0.0, move_head=False)
    assert [numbers(change) for change in watch.look(ledger.live).values()] == [(0, 0, 0, 0)]
    again = ledger.split(grant, 1, 0.0, move_head=True)
    ledger.release(rest)
    assert numbers(watch.look(ledger.live)["one"]) == (0, 0, 2, 0)
    assert (len(grant.block_ids), len(again.block_ids), watch.held()) == (2, 1, {"one": 3})


def test_blocks_taken_for_a_row_that_a_preemption_takes_away() -> None:
    pool = BlockPool(8, PrefixCache())
    ledger, watch = GrantLedger(pool), BlockWatch()
    grant = ledger.open("one", pool.take(2), 0.0)
    watch.look(ledger.live)
    grant.block_ids += pool.take(1)
    ledger.release(grant)
    assert numbers(watch.look(ledger.live)["one"]) == (1, 0, 3, 0)


def watched(**config: Any) -> WatchedCore:
    configuration = SchedulerConfiguration(
        usable_blocks=8, block_size=4, kv_connector=True, kv_load_failure_policy="recompute", **config
    )
    return WatchedCore(configuration, collector=Collector())


def test_fenced_blocks_come_back_in_the_step_that_touched_them() -> None:
    core = watched(fence_frees=True, async_scheduling=True)
    core.add(request_of("one", 6), 0.0)
    plan, following = core.schedule(0.0), core.schedule(0.0)
    core.abort("one", 0.0)
    core.apply(result_of(plan), 0.0)
    core.apply(result_of(following), 0.0)
    first, second = (step.rows["one"] for step in core.collector.end() if step.number)
    assert (first.events, first.blocks_freed) == (["added", "new", "came back for nothing"], 0)
    assert second.events == ["aborted", "2 blocks fenced until step 2 is back", "came back for nothing"]
    assert (second.blocks_freed, second.blocks_held) == (2, 0)


def test_quarantined_blocks_come_back_when_the_load_is_quiet() -> None:
    """The request had been computed here meanwhile, and was gone: its row is that of the blocks alone."""
    core = watched()
    core.add(request_of("one", 8, max_tokens=1, ticket=ticket_of(8)), 0.0)
    core.schedule(0.0)
    (order,) = (effect for effect in core.take_effects() if isinstance(effect, LoadBlocks))
    core.apply(TransferFailed("one", order.generation, "deadline", quarantined=True), 1.0)
    core.apply(result_of(core.schedule(2.0)), 2.0)
    core.add(request_of("two", 4, first=50), 2.0)
    core.apply(result_of(core.schedule(3.0)), 3.0)
    core.apply(BlocksQuiet("one", order.generation), 3.0)
    loads, computes, frees = (step.rows["one"] for step in core.collector.end() if step.number)
    assert loads.events == ["added", "loading", "load failed: deadline", "2 blocks quarantined"]
    assert (computes.blocks_allocated, computes.blocks_freed, computes.blocks_held) == (2, 2, 2)
    assert (frees.status, frees.events) == ("", ["failed load is quiet"])
    assert (frees.blocks_freed, frees.blocks_held) == (2, 0)
