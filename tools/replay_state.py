"""What a replay stopped at, as text: the queues, the blocks, the steps in flight."""

from __future__ import annotations

from collections.abc import Iterable

from actors.scheduling.replay import Replay
from actors.scheduling.request import SchedulerRequest

_SHOWN_BLOCKS = 8


def render(run: Replay) -> str:
    core, header = run.core, run.header
    report = core.blocks_report(run.now)
    lines = [
        f"{header.engine_id} epoch {header.epoch}: step {run.last_step} at {run.now - header.started:.3f} s",
        "",
        *_queue(run, "running", core.running),
        *_queue(run, "waiting", core.waiting),
        *_queue(run, "skipped_waiting", core.skipped_waiting),
        f"blocks: {report.usable} usable = {report.free} free + {report.held} held + {report.fenced} fenced"
        f" + {report.leased} leased + {report.quarantined} quarantined",
        *(
            f"  {grant.request_id} generation {grant.generation}: {grant.blocks} {grant.state}"
            f" for {grant.age_s:.3f} s ({grant.reason})"
            for grant in report.grants
        ),
        f"in flight: {len(run.in_flight)} steps",
        *(
            f"  step {plan.step}: {len(plan.request_ids)} requests, {plan.num_tokens} tokens"
            for plan in run.in_flight.values()
        ),
    ]
    return "\n".join(lines)


def _queue(run: Replay, name: str, requests: Iterable[SchedulerRequest]) -> list[str]:
    found = list(requests)
    return [f"{name}: {len(found)}", *(_request(run, request) for request in found)]


def _request(run: Replay, request: SchedulerRequest) -> str:
    story = run.core.story(request.request_id)
    assert story is not None
    last = story.intervals[-1]
    blocks = request.block_ids
    shown = ", ".join(map(str, blocks[:_SHOWN_BLOCKS])) + ", …" * (len(blocks) > _SHOWN_BLOCKS)
    why = f"{last.reason} for {run.now - last.start:.3f} s" + (f" ({last.detail})" if last.detail else "")
    return (
        f"  {request.request_id} {request.status.name}: {request.num_computed_tokens} computed of"
        f" {len(request.tokens)} known, {len(request.drafts)} drafts, {request.num_placeholders} placeholders,"
        f" {len(blocks)} blocks [{shown}]; {why}"
    )
