"""Encoder outputs: which fit this step's compute budget and the cache, and which requests still need them.

An output stays while a request refers to it; afterwards it may be evicted, oldest first. Capacity counts each output
once with its length. Invariant: `num_free` + lengths of all cached outputs = `capacity`.
"""

from __future__ import annotations

from actors.scheduling.request import EncoderInput, SchedulerRequest


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_free = capacity
        self.shortage = ""  # why the last `fit` cut short
        self._holders: dict[str, dict[str, int]] = {}  # hash -> request id -> length
        self._evictable: dict[str, int] = {}  # hash -> length, oldest first
        self._held_by: dict[str, dict[str, EncoderInput]] = {}  # request id -> hash -> item

    def fit(
        self, request: SchedulerRequest, start: int, num_tokens: int, budget: int
    ) -> tuple[int, list[EncoderInput], int]:
        """For tokens [start, start + num_tokens): how many of them, after which encoder runs, and the budget left.

        Takes references on outputs that are cached already; `take` makes the others the request's.
        """
        to_run: list[EncoderInput] = []
        planned = 0
        for item in request.encoder_inputs:
            if item.offset >= start + num_tokens:
                break
            if item.offset + item.length <= start or any(item.hash == other.hash for other in to_run):
                continue
            if item.hash in self._holders or item.hash in self._evictable:
                self._refer(request, item)
                continue
            if item.length > budget or not self._make_room(planned + item.length):
                self.shortage = f"has an encoder input of {item.length} tokens, {budget} left in the step's budget"
                if item.length <= budget:
                    self.shortage = f"has an encoder input of {item.length} tokens, {self.num_free} free in the cache"
                num_tokens = max(item.offset - start, 0)
                break
            to_run.append(item)
            planned += item.length
            budget -= item.length
        return num_tokens, to_run, budget

    def can_never_hold(self, request: SchedulerRequest, budget: int) -> bool:
        """Whether one of its items is larger than a whole step's budget, or than the whole cache."""
        return any(item.length > min(budget, self.capacity) for item in request.encoder_inputs)

    def take(self, request: SchedulerRequest, items: list[EncoderInput]) -> None:
        for item in items:
            self.num_free -= item.length
            self._refer(request, item)

    def release_passed(self, request: SchedulerRequest, num_confirmed_tokens: int) -> None:
        """Outputs whose positions are all computed are not needed by this request any more."""
        for item in list(self._held_by.get(request.request_id, {}).values()):
            if item.offset + item.length <= num_confirmed_tokens:
                self._release(request.request_id, item)

    def release_all(self, request: SchedulerRequest) -> None:
        for item in list(self._held_by.get(request.request_id, {}).values()):
            self._release(request.request_id, item)

    def is_held(self, request_id: str, item_hash: str) -> bool:
        return item_hash in self._held_by.get(request_id, {})

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
        return True
