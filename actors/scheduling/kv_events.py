"""What the prefix cache says of itself, for whoever routes requests by it: `kv_events` of the configuration.

A prefix is announced when the first block holds it, and taken back when the last one no longer does. Its hash is made
of everything that distinguishes it (parent hash, tokens, adapter, salt, encoder items), so equal prefixes have equal
hashes in every engine. Invariant: what was announced and not taken back is what some block holds.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from actors.scheduling.prefix_cache import ROOT, Extra, PrefixCache


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks of one prompt that follow each other; `parent_hash` is that of the block before the first of them."""

    block_hashes: tuple[bytes, ...]  # 32 bytes each
    parent_hash: bytes | None  # None: they begin the prompt
    token_ids: tuple[int, ...]
    block_size: int
    lora: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


KVEvent = BlocksStored | BlockRemoved | AllBlocksCleared


class AnnouncedCache(PrefixCache):
    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self._hashes = {ROOT: b""}  # by entry id
        self._num_entries: Counter[bytes] = Counter()
        self._events: list[KVEvent] = []
        # What the next BlocksStored will say; it grows while each block's parent is the one before.
        self._parent = b""
        self._stored: list[bytes] = []
        self._tokens: list[int] = []
        self._lora: str | None = None

    def take_events(self) -> list[KVEvent]:
        self._end_run()
        events, self._events = self._events, []
        return events

    def register(self, block: int, parent: int, extra: Extra, tokens: tuple[int, ...]) -> int:
        entry_id = super().register(block, parent, extra, tokens)
        parent_hash = self._hashes.get(parent)  # None: it is forgotten, so this block cannot be found either
        if entry_id not in self._hashes and parent_hash is not None:
            block_hash = hashlib.sha256(msgspec.msgpack.encode((parent_hash, extra, tokens))).digest()
            self._hashes[entry_id] = block_hash
            self._num_entries[block_hash] += 1
            if self._num_entries[block_hash] == 1:
                self._announce(parent_hash, block_hash, extra, tokens)
        return entry_id

    def forget(self, block: int) -> None:
        entry = self.entry_of.get(block)
        super().forget(block)
        if entry is None or entry.blocks:
            return
        block_hash = self._hashes.pop(entry.entry_id, None)
        if block_hash is None:
            return
        self._num_entries[block_hash] -= 1
        if not self._num_entries[block_hash]:
            del self._num_entries[block_hash]
            self._end_run()
            self._events.append(BlockRemoved(block_hash))

    def clear(self) -> None:
        super().clear()
        self._hashes = {ROOT: b""}
        self._num_entries.clear()
        self._end_run()
        self._events.append(AllBlocksCleared())

    def _announce(self, parent_hash: bytes, block_hash: bytes, extra: Extra, tokens: tuple[int, ...]) -> None:
        if not self._stored or self._stored[-1] != parent_hash:
            self._end_run()
            self._parent = parent_hash
            lora = extra[0] if extra else None
            self._lora = lora if isinstance(lora, str) else None
        self._stored.append(block_hash)
        self._tokens += tokens

    def _end_run(self) -> None:
        if self._stored:
            stored, tokens, parent = tuple(self._stored), tuple(self._tokens), self._parent or None
            self._events.append(BlocksStored(stored, parent, tokens, self._block_size, self._lora))
            self._stored, self._tokens = [], []
