"""One waiting request at the head of its queue: it is admitted, or starts its load, or there is a reason why not.

Nothing but its status changes unless it is admitted or its load starts.
"""

from __future__ import annotations

from enum import Enum

from actors.messages.plan import NewRequest
from actors.scheduling.connector import NOTHING_REMOTE
from actors.scheduling.holders import would_starve
from actors.scheduling.orders import int32
from actors.scheduling.request import EncoderInput, LoadPhase, SchedulerRequest, Status
from actors.scheduling.running import add_row
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import ScheduledStep


class Verdict(Enum):
    ADMITTED = "admitted"
    LOADING = "loading"
    SKIP = "skip"
    STOP = "stop"
    NO_ROOM = "no room"  # a stop for want of blocks


def try_to_admit(
    state: SchedulerState, step: ScheduledStep, request: SchedulerRequest, adapters: set[str | None], now: float
) -> tuple[Verdict, str]:
    """Admits the request, or starts its load, or says why not. Changes nothing but its status in the latter case."""
    config, kv = state.config, state.kv
    if not promote(state, request, now):
        return Verdict.SKIP, request.story.detail
    if request.num_preemptions and _token_is_on_its_way(state, request):
        return Verdict.SKIP, "a token of a step before its preemption is on its way"
    adapter = request.engine_request.lora
    if config.max_loras and adapter is not None and adapter not in adapters and len(adapters) >= config.max_loras:
        return Verdict.SKIP, f"max_loras {config.max_loras} reached"
    num_known = len(request.tokens)
    hits: list[int] = []
    remote = NOTHING_REMOTE
    num_local = request.num_computed_tokens
    if num_local == 0:
        hits = kv.lookup(request)
        num_local = len(hits) * config.block_size
        if state.connector is not None:
            answer = state.connector.matched(request, num_local)
            if answer is None:
                return Verdict.SKIP, "the connector does not know yet"
            if not (answer.is_async and num_known == 1):  # a lone token is computed here in any case
                remote = answer
    num_computed = num_local + remote.num_tokens
    assert num_computed <= num_known
    encoder_runs: list[EncoderInput] = []
    encoder_budget = step.encoder_budget
    count = num_drafts = 0
    if not remote.is_async:
        count = num_known - num_computed
        if count == 1 and _batch_is_uniform(state, step):
            num_drafts = config.num_spec_tokens
            count += num_drafts
            if count > step.budget or num_computed + count > config.max_model_len:
                return Verdict.STOP, f"needs {count} tokens like the rest of the batch, {step.budget} left in the step"
        if config.long_prefill_token_threshold:
            count = min(count, config.long_prefill_token_threshold)
        if (
            not config.chunked_prefill
            and count > step.budget
            and (step.requests or count <= config.max_num_batched_tokens)
        ):
            return Verdict.STOP, f"needs {count} tokens at once, {step.budget} left in the step"
        count = min(count, step.budget)
        if request.encoder_inputs:
            count, encoder_runs, encoder_budget = state.encoder.fit(request, num_computed, count, encoder_budget)
            if count == 0:
                state.encoder.release_all(request)
                return Verdict.STOP, state.encoder.shortage
    if request.starved and state.is_at_a_standstill and would_starve(state, request, hits):
        state.encoder.release_all(request)
        return Verdict.NO_ROOM, kv.shortage
    if not _allocate(state, request, num_computed + count, hits, remote.is_async, now):
        state.encoder.release_all(request)
        return Verdict.NO_ROOM, kv.shortage
    if hits:
        step.cached[request.request_id] = num_local
        state.num_prefix_hit_tokens += num_local
    if not request.num_preemptions and (hits or remote.num_tokens):
        request.num_cached_tokens = num_computed
    request.starved = False
    request.num_computed_tokens = num_computed
    if num_computed + count < num_known:
        request.reserves_rest = True
        state.unfinished_prefills[request.request_id] = request
    if remote.is_async:
        _start_load(state, step, request, len(hits), remote.num_tokens, now)
        return Verdict.LOADING, f"loads {remote.num_tokens} tokens into {len(request.block_ids) - len(hits)} blocks"
    state.discharge_ticket(request)
    if encoder_runs:
        state.encoder.take(request, encoder_runs)
        step.encoder_runs[request.request_id] = encoder_runs
        step.encoder_budget = encoder_budget
    if adapter is not None:
        adapters.add(adapter)
    if config.trim_padding:
        num_drafts = min(num_drafts, count - 1)
    _add_admitted_row(state, step, request, count, num_drafts, now)
    return Verdict.ADMITTED, ""


def _token_is_on_its_way(state: SchedulerState, request: SchedulerRequest) -> bool:
    """Resumed now, its worker would be told of all tokens but this one."""
    step = state.in_flight.get(request.last_step)
    if step is None:
        return False
    row = step.requests.index(request)
    return step.sampled[row] > 0 and step.epochs[row] == request.epoch


def _batch_is_uniform(state: SchedulerState, step: ScheduledStep) -> bool:
    """With speculation, whether every row so far is a decode with its drafts: then a lone token gets empty drafts."""
    return bool(state.config.num_spec_tokens and step.num_running and not step.has_prefill_chunk)


def promote(state: SchedulerState, request: SchedulerRequest, now: float) -> bool:
    """A blocked request whose wait is over may be scheduled again. False: it is still blocked."""
    if request.status is Status.WAITING_FOR_GRAMMAR:
        if not request.grammar_ready:
            return False
        request.story.turn("queued", now)
    elif request.status is Status.WAITING_FOR_REMOTE_KVS:
        if request.load_phase is not LoadPhase.REPORTED:
            return False
        request.load_phase = LoadPhase.NONE
        detail = request.story.detail if request.load_failed else "loaded"
        if request.load_failed and request.num_computed_tokens == 0:
            if request.grant is not None:
                state.give_back(request, request.grant, now)
            request.forget_blocks()
            state.unfinished_prefills.pop(request.request_id, None)
        else:
            state.kv.register(request, request.num_computed_tokens)
            if request.num_computed_tokens == len(request.tokens):
                request.num_computed_tokens -= 1  # without logits of the last token there is no next one
        request.load_failed = False
        request.story.turn("queued", now, detail)
    else:
        return True
    request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
    return True


def _allocate(
    state: SchedulerState, request: SchedulerRequest, num_tokens: int, hits: list[int], is_load: bool, now: float
) -> bool:
    kv, config = state.kv, state.config
    spare = int(config.watermark * config.usable_blocks) if state.running else 0
    if config.reserve_full_sequence and not kv.fits(request, len(request.tokens), hits, spare=spare, reserved=0):
        return False
    reserved = 0
    if is_load:
        others = (other for other in state.unfinished_prefills.values() if other is not request)
        reserved = sum(kv.num_missing_blocks(other) for other in others)
    else:
        num_tokens += kv.num_lookahead
    return kv.admit(request, num_tokens, hits, now, spare=spare, reserved=reserved)


def _start_load(
    state: SchedulerState, step: ScheduledStep, request: SchedulerRequest, num_hits: int, num_tokens: int, now: float
) -> None:
    request.status = Status.WAITING_FOR_REMOTE_KVS
    request.reserves_rest = True
    state.unfinished_prefills[request.request_id] = request
    step.loading[request.request_id] = num_tokens
    request.story.turn("waiting_for_remote_kvs", now)
    state.transfers.start_load(request, num_hits, now)


def _add_admitted_row(
    state: SchedulerState, step: ScheduledStep, request: SchedulerRequest, count: int, num_drafts: int, now: float
) -> None:
    """For the worker, a resumed request is a new one: it gets all known tokens and the whole block table."""
    (step.resumed if request.status is Status.PREEMPTED else step.new).append(request.request_id)
    request.status = Status.RUNNING
    step.new_requests.append(
        NewRequest(
            request.request_id, int32(request.tokens), request.num_prompt_tokens, request.engine_request.sampling
        )
    )
    if num_drafts:
        step.drafts[request.request_id] = [-1] * num_drafts
    add_row(state, step, request, count, num_drafts, request.block_ids)
    request.story.detail = state.why_it_waits(request)
    request.story.turn("prefill", now)
    request.story_says_prefill = True
