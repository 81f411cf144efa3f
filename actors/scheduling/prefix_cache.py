"""Which block holds the KV of which tokens behind which prefix.

An entry's key is its parent entry's id, what isolates it (adapter, cache salt, encoder items) and its tokens
themselves. The dict compares them whole, so two prefixes whose hashes collide are still two entries, and nothing
depends on PYTHONHASHSEED. Ids are never used again: when a parent is forgotten, what hung on it can no longer be found.

Several blocks may hold the same entry (two requests computed it at the same time); a lookup finds the oldest.
Invariant: an entry has at least one block, and `entry_of` says the same as the entries' block lists.
"""

from __future__ import annotations

ROOT = 0  # parent id of a request's first block

Extra = tuple[object, ...] | None
Key = tuple[int, Extra, tuple[int, ...]]


class CacheEntry:
    __slots__ = ("blocks", "entry_id", "key")

    def __init__(self, entry_id: int, key: Key) -> None:
        self.entry_id = entry_id
        self.key = key
        self.blocks: list[int] = []


class PrefixCache:
    def __init__(self) -> None:
        self.entries: dict[Key, CacheEntry] = {}
        self.entry_of: dict[int, CacheEntry] = {}
        self._last_id = ROOT

    def find(self, parent: int, extra: Extra, tokens: tuple[int, ...]) -> CacheEntry | None:
        return self.entries.get((parent, extra, tokens))

    def register(self, block: int, parent: int, extra: Extra, tokens: tuple[int, ...]) -> int:
        """The block will hold this by the time anyone reads it. Answers the entry's id, the parent of what follows."""
        key = (parent, extra, tokens)
        entry = self.entries.get(key)
        if entry is None:
            self._last_id += 1
            entry = self.entries[key] = CacheEntry(self._last_id, key)
        if block in self.entry_of:
            raise ValueError(f"block {block} is registered already")
        entry.blocks.append(block)
        self.entry_of[block] = entry
        return entry.entry_id

    def forget(self, block: int) -> None:
        """The block is about to hold something else. Unknown blocks are ignored."""
        entry = self.entry_of.pop(block, None)
        if entry is None:
            return
        entry.blocks.remove(block)
        if not entry.blocks:
            del self.entries[entry.key]

    def clear(self) -> None:
        self.entries.clear()
        self.entry_of.clear()
