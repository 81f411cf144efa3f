"""What is announced of the prefix cache: a prefix when it can first be found, and when it no longer can."""

from __future__ import annotations

from actors.messages.request import EngineRequest
from actors.scheduling.core import SchedulerCore
from actors.scheduling.kv_events import AnnouncedCache, BlockRemoved, BlocksStored
from actors.scheduling.prefix_cache import ROOT, PrefixCache
from tests.scheduling.builders import core_of, request_of, run_step


def core_with_events(**config: object) -> SchedulerCore:
    return core_of(prefix_caching=True, kv_events=True, kv_connector=False, **config)


def test_a_prefix_in_two_blocks_is_announced_once_and_taken_back_with_the_last() -> None:
    cache = AnnouncedCache(2)
    parent = cache.register(1, ROOT, None, (5, 6))
    assert cache.register(2, ROOT, None, (5, 6)) == parent
    (stored,) = cache.take_events()
    assert isinstance(stored, BlocksStored)
    assert (len(stored.block_hashes), stored.token_ids, stored.block_size) == (1, (5, 6), 2)
    cache.forget(1)
    assert cache.take_events() == []
    cache.forget(2)
    assert cache.take_events() == [BlockRemoved(stored.block_hashes[0])]


def test_a_chain_is_one_event_and_names_its_parent() -> None:
    """Two requests share a block of 4: the second's event begins behind it."""
    core = core_with_events()
    core.add(request_of("a", 9), 0.0)
    core.schedule(0.0)
    (first,) = core.take_kv_events()
    assert isinstance(first, BlocksStored)
    core.add(EngineRequest("b", (0, 1, 2, 3, 50, 51, 52, 53, 54)), 0.0)
    core.schedule(0.0)
    (second,) = core.take_kv_events()
    assert isinstance(second, BlocksStored)
    assert (second.parent_hash, second.token_ids) == (first.block_hashes[0], (50, 51, 52, 53))


def test_equal_prompts_have_equal_hashes_in_every_engine_and_isolated_ones_have_not() -> None:
    hashes = []
    for lora, salt in ((None, None), (None, None), (None, "s"), ("x", None)):
        core = core_with_events()
        core.add(request_of("a", 4, lora=lora, cache_salt=salt), 0.0)
        run_step(core)
        (stored,) = core.take_kv_events()
        assert isinstance(stored, BlocksStored)
        assert stored.lora == lora
        hashes.append(stored.block_hashes)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_block_whose_parent_is_forgotten_is_not_announced() -> None:
    """Nobody can find it: a lookup ends before it."""
    cache = AnnouncedCache(2)
    parent = cache.register(1, ROOT, None, (5, 6))
    cache.forget(1)
    cache.take_events()
    cache.register(2, parent, None, (7, 8))
    cache.forget(2)
    assert cache.take_events() == []


def test_a_prefix_that_is_computed_again_is_not_announced_twice() -> None:
    """Its parent goes and comes back: the child's old block can no longer be found, the new one takes its place."""
    cache = AnnouncedCache(2)
    parent = cache.register(1, ROOT, None, (5, 6))
    cache.register(2, parent, None, (7, 8))
    (stored,) = cache.take_events()
    assert isinstance(stored, BlocksStored)
    first, second = stored.block_hashes
    cache.forget(1)
    parent = cache.register(3, ROOT, None, (5, 6))
    cache.register(4, parent, None, (7, 8))
    assert cache.take_events() == [BlockRemoved(first), BlocksStored((first,), None, (5, 6), 2)]
    cache.forget(2)
    assert cache.take_events() == []
    cache.forget(4)
    assert cache.take_events() == [BlockRemoved(second)]


def test_without_the_key_there_is_nothing_to_take_and_nothing_kept() -> None:
    core = core_of(prefix_caching=True, kv_connector=False)
    core.add(request_of("a", 9), 0.0)
    run_step(core)
    assert core.take_kv_events() == []
    assert type(core._state.kv.cache) is PrefixCache
