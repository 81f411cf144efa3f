"""Recomputes from scratch what must always be true. After every event in tests, when idle in production."""

from __future__ import annotations

from collections import Counter

from actors.messages.errors import KvyardError
from actors.scheduling.grants import GrantState
from actors.scheduling.request import InFlightTokens, LoadPhase, SchedulerRequest, Status
from actors.scheduling.state import SchedulerState


class InvariantBroken(KvyardError):
    """The scheduler contradicts itself: a bug. `story` is the life of the request concerned, if there is one."""

    def __init__(self, text: str, request: SchedulerRequest | None = None) -> None:
        self.story = "" if request is None else str(request.story)
        super().__init__(text if request is None else f"{text}: {request!r}; its story: {self.story}")


def check(state: SchedulerState) -> None:
    _check_blocks(state)
    _check_cache(state)
    _check_queues(state)
    _check_owners(state)
    encoder = state.encoder
    _require(encoder.num_free + encoder.num_cached_tokens() == encoder.capacity, "the encoder cache does not add up")
    for request in state.requests.values():
        if request.status is not Status.FINISHED:
            _check_request(state, request)


def _require(condition: bool, text: str, request: SchedulerRequest | None = None) -> None:
    if not condition:
        raise InvariantBroken(text, request)


def _check_blocks(state: SchedulerState) -> None:
    pool, grants = state.kv.pool, list(state.kv.ledger.live.values())
    counts = Counter(block for grant in grants for block in grant.block_ids)
    _require(0 not in counts, "the null block is granted")
    for block in range(1, pool.usable_blocks + 1):
        if pool.ref_counts[block] != counts[block]:
            raise InvariantBroken(
                f"block {block} has {pool.ref_counts[block]} references and {counts[block]} grants name it"
            )
    for grant in grants:
        _require(len(set(grant.block_ids)) == len(grant.block_ids), f"grant {grant.generation} names a block twice")
    free = list(pool.free_blocks())
    _require(len(free) == pool.num_free == len(set(free)), "the free list does not count right")
    _require(all(not counts[block] for block in free), "a block is free and held")
    _require(len(free) + len(counts) == pool.usable_blocks, "a block is lost")
    strongest = Counter(max(grant.state for grant in grants if block in grant.block_ids) for block in counts)
    counted = state.kv.ledger.count()
    _require(all(counted[one] == strongest[one] for one in GrantState), "blocks per state do not count right")


def _check_cache(state: SchedulerState) -> None:
    cache = state.kv.cache
    listed = {block: entry for entry in cache.entries.values() for block in entry.blocks}
    _require(listed == cache.entry_of, "the prefix cache contradicts itself")
    _require(all(entry.blocks for entry in cache.entries.values()), "a cache entry without a block")


def _check_queues(state: SchedulerState) -> None:
    queued = [*state.running, *state.waiting, *state.skipped_waiting]
    ids = Counter(request.request_id for request in queued)
    for request in queued:
        _require(ids[request.request_id] == 1, "a request is in two queues", request)
        _require(state.requests.get(request.request_id) is request, "a queued request is not known", request)
        _require((request in state.running) == (request.status is Status.RUNNING), "wrong queue", request)
    granting = {lease.request.request_id for lease in state.transfers.leases.values() if lease.output is not None}
    _require(set(state.requests) == set(ids) | granting, "a live request is in no queue")
    _require(len(state.running) <= state.config.max_num_seqs, "more run than max_num_seqs")


def _check_owners(state: SchedulerState) -> None:
    """Every live grant has exactly one who will release it."""
    transfers = state.transfers
    owners = Counter(request.grant.generation for request in state.requests.values() if request.grant is not None)
    owners.update(load.grant.generation for load in transfers.loads.values() if not load.is_wanted)
    owners.update(lease.grant.generation for lease in transfers.leases.values() if lease.grant is not None)
    owners.update(list(transfers.quarantined))
    for grant in state.kv.ledger.live.values():
        num_owners = owners.pop(grant.generation, 0) + (grant.state is GrantState.FENCED)
        _require(num_owners == 1, f"grant {grant.generation} of {grant.request_id} has {num_owners} owners")
        if grant.state is GrantState.FENCED:
            _require(grant.fence_step in state.in_flight, "a fence without its step")
    _require(not owners, f"grants {sorted(owners)} are owned and not live")


def _check_request(state: SchedulerState, request: SchedulerRequest) -> None:
    held = len(request.block_ids) * state.config.block_size
    ahead = len(request.drafts) + request.num_placeholders
    _require(request.num_computed_tokens >= 0, "computed below zero", request)
    _require(
        request.num_computed_tokens <= len(request.tokens) + max(ahead, _drafts_in_flight(state, request)),
        "computed beyond what is known",
        request,
    )
    _require(held >= request.num_computed_tokens, "computed beyond its blocks", request)
    _require(request.num_registered <= len(request.block_ids), "registered beyond its blocks", request)
    expected = tuple(
        InFlightTokens(step.step, step.sampled[row])
        for step in state.in_flight.values()
        for row, other in enumerate(step.requests)
        if other is request and step.epochs[row] == request.epoch and step.sampled[row]
    )
    _require(
        request.in_flight == (expected if state.config.async_scheduling else ()),
        f"{request.in_flight} is in flight by its record, {expected} by the steps",
        request,
    )
    if request.load_phase is LoadPhase.IN_FLIGHT:
        _require(request.status is Status.WAITING_FOR_REMOTE_KVS, "a load of a request that does not wait", request)
        _require(
            request.grant is not None and request.grant.generation in state.transfers.loads, "a lost load", request
        )
    if request.status is Status.RUNNING:
        _require(request.grant is not None, "running without blocks", request)


def _drafts_in_flight(state: SchedulerState, request: SchedulerRequest) -> int:
    return max((len(step.drafts.get(request.request_id, ())) for step in state.in_flight.values()), default=0)
