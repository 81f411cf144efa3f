"""The running pass of a step: every running request, in order, gets the tokens it lacks, as far as the budget goes.

When blocks run out somebody is preempted: the last of `running`, or with priorities the least important. A victim that
has its row in this step already loses it. The loop never passes over another request because of a victim's removal.
"""

from __future__ import annotations

from actors.messages.errors import RefusalReason
from actors.messages.request import FinishReason
from actors.scheduling.request import InFlightTokens, SchedulerRequest
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import ScheduledStep


def schedule_running(state: SchedulerState, step: ScheduledStep, now: float) -> None:
    config, running, kv = state.config, state.running, state.kv
    threshold, max_model_len, block_size = config.long_prefill_token_threshold, config.max_model_len, config.block_size
    lookahead = kv.num_lookahead
    index = 0
    while index < len(running) and step.budget > 0:
        request = running[index]
        index += 1
        num_known = len(request.tokens)
        computed, placeholders = request.num_computed_tokens, request.num_placeholders
        if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
            continue  # even with every draft rejected, the steps in flight reach max_tokens
        count = num_known + len(request.drafts) + placeholders - computed
        if count > 1:
            if 0 < threshold < count:
                count = threshold
            count = min(count, step.budget)
        count = min(count, max_model_len - 1 - computed)
        if request.encoder_inputs and count > 0:
            count, runs, encoder_budget = state.encoder.fit(request, computed, count, step.encoder_budget)
            if count == 0 and state.encoder.can_never_hold(request, config.encoder_budget):
                text = f"it can never go on: it {state.encoder.shortage}"
                state.end(request, FinishReason.ERROR, now, RefusalReason.INVALID_REQUEST, text)
                index -= 1
                continue
        else:
            runs, encoder_budget = [], step.encoder_budget
        if count <= 0:
            continue

        assert request.grant is not None
        block_ids = request.grant.block_ids
        num_missing = -(-(computed + count + lookahead) // block_size) - len(block_ids)
        new_blocks: list[int] = []
        if num_missing > 0:
            if lookahead:  # not beyond the context
                num_missing = kv.num_blocks_for(computed + count + lookahead) - len(block_ids)
            if num_missing > kv.pool.num_free:
                index, outcome = _make_room(state, step, request, num_missing, index, now)
                if outcome == "ended":
                    break
                if outcome == "wait":
                    continue
            new_blocks = kv.pool.take(num_missing)
            block_ids += new_blocks

        # Drafts that are not scheduled now are not kept: they were made for this position.
        num_drafts = max(count + computed - num_known - placeholders, 0)
        if request.drafts:
            if num_drafts:
                step.drafts[request.request_id] = list(request.drafts[:num_drafts])
            request.drafts = ()
        step.has_prefill_chunk |= request.is_prefill_chunk
        add_row(state, step, request, count, num_drafts, new_blocks)
        if runs:
            state.encoder.take(request, runs)
            step.encoder_runs[request.request_id] = runs
            step.encoder_budget = encoder_budget
    step.num_running = len(step.requests)
    assert step.budget >= 0


def add_row(
    state: SchedulerState,
    step: ScheduledStep,
    request: SchedulerRequest,
    count: int,
    num_drafts: int,
    new_blocks: list[int],
) -> None:
    """The request takes part in the step with `count` tokens: everything that it knows from here on counts them."""
    num_known = len(request.tokens)
    computed = request.num_computed_tokens + count
    if computed < num_known + request.num_placeholders:
        num_sampled = 0
        request.is_prefill_chunk = True
    else:
        num_sampled = 1 + num_drafts
        request.is_prefill_chunk = False
        if request.reserves_rest:
            request.reserves_rest = False
            state.unfinished_prefills.pop(request.request_id, None)
    step.add_row(request, count, num_sampled, new_blocks)
    request.num_computed_tokens = computed
    kv = state.kv
    if kv.caching and min(computed, num_known) // kv.block_size > request.num_registered:
        kv.register(request, min(computed, num_known))
    if num_sampled and state.config.async_scheduling:
        request.in_flight += (InFlightTokens(step.step, num_sampled),)
        if state.config.num_spec_tokens:
            request.drafts = [-1] * state.config.num_spec_tokens


def _make_room(
    state: SchedulerState, step: ScheduledStep, request: SchedulerRequest, num_missing: int, index: int, now: float
) -> tuple[int, str]:
    """Preempts until `num_missing` blocks are free. (index of the loop, "fits" | "wait" | "ended")."""
    running, kv = state.running, state.kv
    while num_missing > kv.pool.num_free:
        if state.config.fence_frees and num_missing <= kv.pool.num_free + kv.ledger.num_coming_back():
            request.story.detail = f"needs {num_missing} blocks, which come back with the step in flight"
            return index, "wait"
        victim_index = _least_important(state) if state.config.policy == "priority" else len(running) - 1
        victim = running.pop(victim_index)
        if victim_index < index:
            index -= 1
        if victim in step.requests:
            _unschedule(state, step, victim)
        if victim is request and not running and not kv.can_ever_hold(request):
            running.append(victim)
            text = (
                f"{len(request.tokens)} tokens need {kv.num_blocks_for(len(request.tokens) + kv.num_lookahead)} blocks,"
                f" the pool has {kv.pool.usable_blocks}: use a larger KV pool"
            )
            state.end(request, FinishReason.ERROR, now, RefusalReason.EXCEEDS_KV_CAPACITY, text)
            return index, "ended"
        state.preempt(victim, now, f"{request.request_id} needed {num_missing} blocks, {kv.pool.num_free} free")
        step.preempted.append(victim.request_id)
        if victim is request:
            request.starved = not running
            return index, "wait" if state.config.pass_over_self_victim else "ended"
    return index, "fits"


def _least_important(state: SchedulerState) -> int:
    """Of those that came at the same time the first, as the reference has it, while that leads anywhere."""
    running = state.running
    if state.is_at_a_standstill:
        # Each would come back behind the other and make it the first: two requests could preempt each other for ever.
        return max(range(len(running)), key=lambda place: running[place].order)
    return max(range(len(running)), key=lambda place: running[place].order[:2])


def _unschedule(state: SchedulerState, step: ScheduledStep, victim: SchedulerRequest) -> None:
    """What this step was to compute stays uncomputed, so nobody may hit it."""
    row = step.requests.index(victim)
    if state.config.async_scheduling and step.sampled[row]:
        victim.in_flight = victim.in_flight[:-1]
    if state.config.forget_uncomputed:
        state.kv.unregister(victim, step.computed[row])
    step.remove_row(row)
