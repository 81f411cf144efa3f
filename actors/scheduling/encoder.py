"""Encoder outputs: which fit this step's compute budget and the cache, and which requests still need them.

An output stays while a request refers to it; afterwards it may be evicted, oldest first. Capacity counts each output
once with its length. Invariant: `num_free` + lengths of all cached outputs = `capacity`.
"""

from __future__ import annotations

import sys

from actors.configuration import SchedulerConfiguration
from actors.scheduling.request import EncoderInput, SchedulerRequest


class EncoderCache:
    def __init__(self, config: SchedulerConfiguration) -> None:
        self.capacity = self.num_free = config.encoder_cache
        self._never_in_part = config.disable_chunked_mm_input  # but for one that no step could compute as a whole
        self._longest_chunk = min(
            config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens
        )
        self._ahead = int(config.uses_eagle)  # positions that the drafter embeds beyond the scheduled ones
        self.shortage = ""  # why the last `fit` cut short
        self._holders: dict[str, dict[str, int]] = {}  # hash -> request id -> length
        self._evictable: dict[str, int] = {}  # hash -> length, oldest first
        self._held_by: dict[str, dict[str, EncoderInput]] = {}  # request id -> hash -> item
        self._evicted: dict[str, None] = {}  # since the last dispatched plan

    def fit(
        self, request: SchedulerRequest, start: int, num_tokens: int, budget: int
    ) -> tuple[int, list[EncoderInput], int]:
        """For tokens [start, start + num_tokens): how many of them, after which encoder runs, and the budget left.

        Takes references on outputs that are cached already; `take` makes the others the request's.
        """
        to_run: list[EncoderInput] = []
        planned = 0
        for item in request.encoder_inputs:
            if item.offset >= start + num_tokens + self._ahead:
                break
            if item.offset + item.length <= start or any(item.hash == other.hash for other in to_run):
                continue
            if item.hash in self._holders or item.hash in self._evictable:
                self._refer(request, item)
                continue
            if self._never_in_part and start < item.offset and start + num_tokens < item.offset + item.length:
                before = item.offset - start - self._ahead
                if before > 0 or item.offset + item.length - start <= self._longest_chunk:
                    self.shortage = f"has an encoder input of {item.length} tokens, to be computed in one step"
                    num_tokens = before
                    break
            if item.length > budget or not self._make_room(planned + item.length):
                self.shortage = f"has an encoder input of {item.length} tokens, {budget} left in the step's budget"
                if item.length <= budget:
                    self.shortage = f"has an encoder input of {item.length} tokens, {self.num_free} free in the cache"
                num_tokens = max(item.offset - start - self._ahead, 0)
                break
            if item.offset >= start + num_tokens:
                continue  # looked ahead at: the next chunk runs it
            to_run.append(item)
            planned += item.length
            budget -= item.length
        return num_tokens, to_run, budget

    def can_never_hold(self, request: SchedulerRequest, budget: int) -> bool:
        """Whether one of its items is larger than a whole step's budget, or than the whole cache.

        Looking ahead, an item is needed one position early and kept one longer: with close neighbours at the same time.
        """
        for item in request.encoder_inputs:
            together = {
                other.hash: other.length
                for other in request.encoder_inputs
                if other.offset <= item.offset < other.offset + other.length + 2 * self._ahead
            }
            if item.length > budget or sum(together.values()) > self.capacity:
                return True
        return False

    def take(self, request: SchedulerRequest, items: list[EncoderInput]) -> None:
        for item in items:
            self.num_free -= item.length
            self._refer(request, item)

    def release_passed(self, request: SchedulerRequest, num_confirmed_tokens: int) -> None:
        """Outputs whose positions are all computed are not needed by this request any more."""
        self._release_each(request, num_confirmed_tokens - self._ahead)

    def release_all(self, request: SchedulerRequest) -> None:
        self._release_each(request, sys.maxsize)

    def _release_each(self, request: SchedulerRequest, position: int) -> None:
        """What it holds and what ends by `position`, in the order of the prompt: in that order they may be evicted."""
        held = self._held_by.get(request.request_id)
        if held is None:
            return
        for item in request.encoder_inputs:
            if item.offset + item.length <= position and held.get(item.hash) is item:
                self._release(request.request_id, item)

    def is_held(self, request_id: str, item_hash: str) -> bool:
        return item_hash in self._held_by.get(request_id, {})

    def take_evicted(self) -> tuple[str, ...]:
        """Hashes of outputs that the worker has no more use for: it forgets them before it runs an encoder."""
        if not self._evicted:
            return ()
        evicted, self._evicted = tuple(self._evicted), {}
        return evicted

    def num_cached_tokens(self) -> int:
        held = {item_hash: max(lengths.values()) for item_hash, lengths in self._holders.items()}
        return sum(held.values()) + sum(self._evictable.values())

    def _refer(self, request: SchedulerRequest, item: EncoderInput) -> None:
        self._evictable.pop(item.hash, None)
        self._holders.setdefault(item.hash, {})[request.request_id] = item.length
        self._held_by.setdefault(request.request_id, {})[item.hash] = item

    def _release(self, request_id: str, item: EncoderInput) -> None:
        held = self._held_by[request_id]
        del held[item.hash]
        if not held:
            del self._held_by[request_id]
        holders = self._holders[item.hash]
        length = holders.pop(request_id)
        if not holders:
            del self._holders[item.hash]
            self._evictable[item.hash] = length

    def _make_room(self, length: int) -> bool:
        if length > self.num_free + sum(self._evictable.values()):
            return False
        while length > self.num_free:
            oldest = next(iter(self._evictable))
            self.num_free += self._evictable.pop(oldest)
            self._evicted[oldest] = None
        return True
