"""What a step's result does: tokens are appended, requests end, failed loads roll back.

A row is ignored when its request is gone (aborted, finished) or its KV turned out to be wrong; a request that was
preempted meanwhile still gets its token, which was computed from blocks that were right.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.messages.errors import RefusalReason
from actors.messages.plan import StepResult
from actors.messages.request import FinishReason, RequestOutput
from actors.scheduling.request import LoadPhase, SchedulerRequest, Status
from actors.scheduling.state import SchedulerState
from actors.scheduling.step import BadBlocks, ScheduledStep
from actors.scheduling.stop import check_stop


def apply_result(state: SchedulerState, result: StepResult | None, bad_blocks: BadBlocks, now: float) -> None:
    """`result` None: an empty step, which was never dispatched, has come back. Unknown and duplicate steps are late.

    Steps are applied in their order: a result that comes before an older step's waits for that. Raises ValueError for
    one whose rows are not the step's; nothing has changed then.
    """
    _check_bad_blocks(state, bad_blocks)
    if result is None:
        _apply_one(state, None, None, bad_blocks, now)
        return
    step = state.in_flight.get(result.step)
    if step is None or result.step in state.early_results:
        state.num_late_events += 1
        return
    _check_shape(step, result)
    state.early_results[result.step] = (result, bad_blocks)
    while state.in_flight and (oldest := next(iter(state.in_flight))) in state.early_results:
        step = state.in_flight.pop(oldest)
        _apply_one(state, step, *state.early_results.pop(oldest), now)


def _check_bad_blocks(state: SchedulerState, bad_blocks: BadBlocks) -> None:
    for request_id, indexes in bad_blocks.items():
        request = state.requests.get(request_id)
        if request is not None and any(not 0 <= index < len(request.block_ids) for index in indexes):
            raise ValueError(f"{request_id} has {len(request.block_ids)} blocks; {list(indexes)} are said to be bad")


def _check_shape(step: ScheduledStep, result: StepResult) -> None:
    counts = memoryview(result.num_sampled).cast("i")
    if len(counts) != len(step.requests):
        raise ValueError(f"step {step.step} has {len(step.requests)} rows, its result {len(counts)}")
    if 4 * sum(counts) != len(result.sampled_token_ids):
        raise ValueError(f"the result of step {step.step} says {sum(counts)} tokens, {result.sampled_token_ids!r} came")
    if any(not 0 <= count <= most for count, most in zip(counts, step.sampled, strict=True)):
        raise ValueError(f"step {step.step} samples at most {step.sampled} tokens, its result has {list(counts)}")


def _apply_one(
    state: SchedulerState, step: ScheduledStep | None, result: StepResult | None, bad_blocks: BadBlocks, now: float
) -> None:
    if step is not None:
        state.kv.ledger.lift_fences(state.in_flight)
    broken = _roll_back(state, step, bad_blocks) if bad_blocks else []
    if step is not None and result is not None:
        _apply_rows(state, step, result, now)
    if state.config.kv_load_failure_policy == "fail":
        for request in broken:
            if request.status is not Status.FINISHED:
                text = "KV blocks of the prompt did not arrive"
                state.end(request, FinishReason.ERROR, now, RefusalReason.KV_LOAD_FAILED, text)


def _apply_rows(state: SchedulerState, step: ScheduledStep, result: StepResult, now: float) -> None:
    counts = memoryview(result.num_sampled).cast("i")
    token_ids = memoryview(result.sampled_token_ids).cast("i").tolist()
    kv, max_model_len = state.kv, state.config.max_model_len
    asynchronous, effects = state.config.async_scheduling, state.effects
    ended: list[SchedulerRequest] = []
    first = 0
    for row, request in enumerate(step.requests):
        expected, count = step.sampled[row], counts[row]
        tokens = token_ids[first : first + count]
        first += count
        if request.status is Status.FINISHED or step.epochs[row] != request.epoch:
            continue
        if asynchronous and expected:
            assert request.in_flight[0].step == step.step
            request.in_flight = request.in_flight[1:]
        if count < expected and request.num_computed_tokens > 0:
            # Rejected drafts; or, if there is no token at all, the whole row was for nothing.
            request.num_computed_tokens = max(request.num_computed_tokens - (expected - count), 0)
        if request.encoder_inputs:
            num_new = count if asynchronous else 0  # not confirmed yet, as the reference counts
            state.encoder.release_passed(request, request.num_computed_tokens - request.num_placeholders - num_new)
        if not tokens:
            continue
        num_cached = request.num_cached_tokens if request.num_output_tokens == 0 else 0
        if request.story_says_prefill and request.status is Status.RUNNING:
            request.story_says_prefill = False
            request.story.turn("decode", now)
        stop = None
        for place, token in enumerate(tokens):
            request.tokens.append(token)
            stop = check_stop(request, max_model_len)
            if stop is not None:
                del tokens[place + 1 :]
                break
        state.num_barren_steps = 0
        if asynchronous and request.status is Status.RUNNING:
            num_dropped = count - len(tokens)  # behind the stop
            kv.register(request, request.num_computed_tokens - request.num_placeholders - num_dropped)
        if stop is None:
            effects.append(RequestOutput(request.request_id, tuple(tokens), num_cached_tokens=num_cached))
            continue
        if request.status is Status.RUNNING:
            ended.append(request)
        else:
            state.take_from_queue(request)
        state.finish(request, stop[0], now, tuple(tokens), stop[1])
    if ended:
        state.running = [request for request in state.running if request.status is not Status.FINISHED]


def _roll_back(state: SchedulerState, step: ScheduledStep | None, bad_blocks: BadBlocks) -> list[SchedulerRequest]:
    """Takes `num_computed_tokens` back to the first bad block of every request that uses one. Answers those."""
    bad = {
        state.requests[request_id].block_ids[index]
        for request_id, indexes in bad_blocks.items()
        if request_id in state.requests
        for index in indexes
        if index < len(state.requests[request_id].block_ids)  # it waited for an older result: the table may be another
    }
    loading = [request for request in state.skipped_waiting if request.load_phase is LoadPhase.IN_FLIGHT]
    broken = _roll_back_each(state, step, loading, bad)
    for request in broken:
        request.load_failed = True
    running = _roll_back_each(state, step, state.running, bad)
    for request in running:
        request.begin_epoch()
        if state.config.kv_load_failure_policy == "fail":
            # Nobody else may hit what was never written.
            state.kv.unregister(request, request.num_computed_tokens)
    return broken + running


def _roll_back_each(
    state: SchedulerState, step: ScheduledStep | None, requests: Sequence[SchedulerRequest], bad: set[int]
) -> list[SchedulerRequest]:
    """A bad block that an earlier request of the scan shares will be computed again by that one."""
    claimed: set[int] = set()
    affected = []
    for request in requests:
        num_scheduled = 0
        if step is not None and request in step.requests:
            num_scheduled = step.counts[step.requests.index(request)]
        confirmed = request.num_computed_tokens - num_scheduled
        block_ids = request.block_ids[: state.kv.num_blocks_for(confirmed)]
        own = [index for index, block in enumerate(block_ids) if block in bad]
        if not own:
            continue
        affected.append(request)
        first = next((index for index in own if block_ids[index] not in claimed), None)
        claimed.update(block_ids[index] for index in own)
        request.num_computed_tokens = confirmed if first is None else first * state.config.block_size
        request.num_cached_tokens = min(request.num_cached_tokens, request.num_computed_tokens)
    return affected
