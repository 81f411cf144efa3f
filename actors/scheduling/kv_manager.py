"""Blocks for requests: prefix hits, allocation at admission, growth while running, registration in the prefix cache.

Admission is all or nothing: it is refused before a reference count changes. Blocks are registered when a step that
computes them is planned, because steps execute in order; blocks that a load fills are registered when it has landed.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.configuration import SchedulerConfiguration
from actors.scheduling.block_pool import BlockPool
from actors.scheduling.grants import GrantLedger
from actors.scheduling.kv_events import AnnouncedCache
from actors.scheduling.prefix_cache import ROOT, Extra, PrefixCache
from actors.scheduling.request import SchedulerRequest


class KVManager:
    def __init__(self, config: SchedulerConfiguration) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.caching = config.prefix_caching
        self.num_lookahead = config.num_lookahead_tokens  # slots behind what a step computes
        self._drops_last_hit = config.uses_eagle
        self.announced = AnnouncedCache(config.block_size) if config.kv_events else None
        self.cache = self.announced or PrefixCache()
        self.pool = BlockPool(config.usable_blocks, self.cache)
        self.ledger = GrantLedger(self.pool)
        self.shortage = ""  # why the last admission was refused

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    def can_ever_hold(self, request: SchedulerRequest) -> bool:
        """Whether its known tokens, and what is looked ahead, fit an empty pool."""
        return self.num_blocks_for(len(request.tokens) + self.num_lookahead) <= self.pool.usable_blocks

    def num_missing_blocks(self, request: SchedulerRequest) -> int:
        """Blocks it still needs for all its known tokens."""
        return max(self.num_blocks_for(len(request.tokens)) - len(request.block_ids), 0)

    def lookup(self, request: SchedulerRequest) -> list[int]:
        """Cached blocks of its longest known prefix, short of the last known token.

        EAGLE computes the last of them again: its drafter needs the target's hidden states right before the new tokens.
        """
        if not self.caching or not request.reads_prefix_cache:
            return []
        hits: list[int] = []
        parent, size, tokens = ROOT, self.block_size, request.tokens
        for index in range((len(tokens) - 1) // size):
            extra = self._extra(request, index) if request.block_extra else None
            entry = self.cache.find(parent, extra, tuple(tokens[index * size : (index + 1) * size]))
            if entry is None:
                break
            hits.append(entry.blocks[0])
            parent = entry.entry_id
        return hits[:-1] if self._drops_last_hit else hits

    def admit(
        self, request: SchedulerRequest, num_tokens: int, hits: Sequence[int], now: float, *, spare: int, reserved: int
    ) -> bool:
        """Blocks for the first `num_tokens` tokens, `hits` among them. False, and nothing changed, if they do not fit.

        `spare` blocks stay free (the watermark), `reserved` are promised to others. `reserve_full_sequence` is the
        caller's: it passes the whole sequence through `fits` first.
        """
        held = len(request.block_ids)
        needed = max(self.num_blocks_for(num_tokens) - max(held, len(hits)), 0)
        if not self.fits(request, num_tokens, hits, spare=spare, reserved=reserved):
            return False
        self.pool.touch(hits)
        new_blocks = [*hits, *self.pool.take(needed)]
        if request.grant is None:
            request.grant = self.ledger.open(request.request_id, new_blocks, now)
        else:
            request.grant.block_ids.extend(new_blocks)
        if hits:
            request.num_registered = len(hits)
            request.cache_parent = self.cache.entry_of[hits[-1]].entry_id
        return True

    def fits(
        self, request: SchedulerRequest, num_tokens: int, hits: Sequence[int], *, spare: int, reserved: int
    ) -> bool:
        """Whether blocks for `num_tokens` could be had now. Hits that nobody holds count: they leave the free list."""
        missing = max(self.num_blocks_for(num_tokens) - max(len(request.block_ids), len(hits)), 0)
        needed = missing + self.pool.num_unreferenced(hits)
        if needed + spare <= self.pool.num_free - reserved:
            return True
        beside = f", {spare} to be spared" * bool(spare) + f", {reserved} reserved" * bool(reserved)
        self.shortage = f"needs {needed} blocks, {self.pool.num_free} free{beside}"
        return False

    def register(self, request: SchedulerRequest, num_tokens: int) -> None:
        """Its full blocks within the first `num_tokens` tokens may be hit from now on."""
        if not self.caching:
            return
        size, tokens, block_ids = self.block_size, request.tokens, request.block_ids
        for index in range(request.num_registered, num_tokens // size):
            extra = self._extra(request, index) if request.block_extra else None
            request.cache_parent = self.cache.register(
                block_ids[index], request.cache_parent, extra, tuple(tokens[index * size : (index + 1) * size])
            )
            request.num_registered = index + 1

    def unregister(self, request: SchedulerRequest, num_tokens: int) -> None:
        """Blocks beyond the first `num_tokens` tokens will not be computed after all. Only before its grant goes."""
        for block in request.block_ids[num_tokens // self.block_size : request.num_registered]:
            self.cache.forget(block)

    def _extra(self, request: SchedulerRequest, index: int) -> Extra:
        start = index * self.block_size
        engine_request = request.engine_request
        items = tuple(
            (item.hash, item.offset - start)
            for item in request.encoder_inputs
            if item.offset < start + self.block_size and start < item.offset + item.length
        )
        lora, salt = engine_request.lora, engine_request.cache_salt if index == 0 else None
        return (lora, salt, items) if lora is not None or salt is not None or items else None
