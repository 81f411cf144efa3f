"""A prefix is found by its tokens and what isolates it, whatever their hashes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.scheduling.prefix_cache import ROOT, PrefixCache

ROOT_FOLDER = Path(__file__).parents[2]


def test_colliding_hashes_are_two_entries() -> None:
    one, other = (0, 5), ((1 << 61) - 1, 5)
    assert hash(one) == hash(other), "CPython: integers are hashed modulo 2**61 - 1"
    cache = PrefixCache()
    cache.register(1, ROOT, None, one)
    assert cache.find(ROOT, None, other) is None
    cache.register(2, ROOT, None, other)
    found = cache.find(ROOT, None, one)
    assert found is not None
    assert found.blocks == [1]


def test_equal_tokens_behind_other_prefixes_are_other_entries() -> None:
    cache = PrefixCache()
    first, second = cache.register(1, ROOT, None, (1,)), cache.register(2, ROOT, None, (2,))
    cache.register(3, first, None, (9,))
    assert cache.find(second, None, (9,)) is None
    assert cache.find(ROOT, ("adapter", None, ()), (1,)) is None


def test_a_lookup_finds_the_oldest_duplicate_and_the_next_when_that_is_gone() -> None:
    cache = PrefixCache()
    assert cache.register(1, ROOT, None, (1,)) == cache.register(2, ROOT, None, (1,))
    entry = cache.find(ROOT, None, (1,))
    assert entry is not None
    assert entry.blocks == [1, 2]
    cache.forget(1)
    assert entry.blocks == [2]
    cache.forget(2)
    assert (cache.find(ROOT, None, (1,)), cache.entry_of) == (None, {})


def test_what_hung_on_a_forgotten_parent_is_not_found_under_a_new_one() -> None:
    cache = PrefixCache()
    old = cache.register(1, ROOT, None, (1,))
    cache.register(2, old, None, (2,))
    cache.forget(1)
    new = cache.register(3, ROOT, None, (1,))
    assert new != old
    assert cache.find(new, None, (2,)) is None


def test_a_block_holds_one_thing() -> None:
    cache = PrefixCache()
    cache.register(1, ROOT, None, (1,))
    with pytest.raises(ValueError, match="block 1 is registered already"):
        cache.register(1, ROOT, None, (2,))


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_plans_do_not_depend_on_the_hash_seed(seed: str) -> None:
    """Two adapters, a salt and a shared prefix; the expected observations are the recorded ones."""
    file = ROOT_FOLDER / "tests/conformance/scenarios/prefix-isolation.json"
    command = [sys.executable, "-m", "tools.steps", "--check", str(file)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    result = subprocess.run(command, cwd=ROOT_FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
