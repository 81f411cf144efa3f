"""The way of one request as text: a line per stage, one per step with its milliseconds, and a total that adds up."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import click

from actors.scheduling.records import Header
from tools.step_table.text import what_happened
from tools.step_table.timeline import Life, OwnStep, Span

_STAGES = ("schedule", "hand-over", "execute", "sample", "publish")
_INDENT = " " * 22
_SHOWN_RANGES = 8


def lines_of(life: Life, header: Header, width: int | None) -> Iterator[str]:
    request = life.request
    ending = "live at the end of the log" if life.ended is None else f"{life.wall_s * 1e3:.3f} ms"
    num_out = sum(len(step.row.token_ids) for step in life.steps)
    trace = f" (X-Request-ID {life.trace_id})" if life.trace_id else ""
    yield click.style(f"request {request.request_id}{trace} in {header.engine_id} (epoch {header.epoch})", bold=True)
    yield (
        f"{len(request.prompt_token_ids)} prompt tokens, {num_out} tokens out (max_tokens {request.max_tokens}); "
        f"arrived {request.arrival - header.started:+.6f} s; {ending}"
    )
    yield ""
    yield click.style(
        f"{'at ms':>11} {'adds ms':>10} " + f"{'stage':12}" + "".join(f"{name:>10}" for name in _STAGES), bold=True
    )
    spans = list(life.spans())
    for span in spans:
        yield from _span(span, request.arrival, header.configuration.block_size, width)
    for step in life.steps:
        if step.returned is None:
            begin = f"{(step.planned - request.arrival) * 1e3:11.3f} {'–':>10} "
            yield f"{begin}step {step.number} IN FLIGHT: its result never came"
            yield from _shapes(step, header.configuration.block_size, width)
    yield from _total(life, spans, width)
    after = [(when, text) for when, text in life.events if life.ended is not None and when > life.ended]
    if after:
        yield "afterwards:"
    for when, text in after:
        yield f"{(when - request.arrival) * 1e3:11.3f} {'':10} {text}"


def _span(span: Span, arrival: float, block_size: int, width: int | None) -> Iterator[str]:
    begin = f"{(span.start - arrival) * 1e3:11.3f} {span.seconds * 1e3:10.3f} "
    if span.step is None:
        text = "" if span.text == span.stage or span.stage == "between" else span.text
        yield from _wrap(f"{begin}{span.stage:12}{text}".rstrip(), width, " " * 34)
        return
    step = span.step
    stages = (step.schedule_s, step.hand_over_s, step.execute_s, step.sample_s, step.publish_s)
    yield click.style(
        f"{begin}{f'step {step.number}':12}" + "".join(f"{seconds * 1e3:10.3f}" for seconds in stages), fg="cyan"
    )
    yield from _shapes(step, block_size, width)


def _shapes(step: OwnStep, block_size: int, width: int | None) -> Iterator[str]:
    shapes, row = step.shapes, step.row
    last = shapes.first_position + shapes.num_tokens - 1
    tokens = f"tokens [{shapes.num_tokens}] of [{shapes.step_tokens}] in {_rows(shapes.step_rows)}"
    yield from _wrap(
        f"{_INDENT}{tokens}; positions {_range(shapes.first_position, last)}; block table [{shapes.num_blocks}]"
        f"{' (whole, with all tokens)' if shapes.is_new else ''}; samples {shapes.num_sampled}"
        f" ({_rows(shapes.step_sampled_rows)} sample{'s' * (shapes.step_sampled_rows == 1)})",
        width,
        _INDENT,
    )
    yield from _wrap(f"{_INDENT}slots {ranges(shapes.slots)} (block_id · {block_size} + offset)", width, _INDENT)
    facts = [f"computed {row.num_computed_tokens} → {row.num_computed_tokens_after} of {row.num_tokens_with_spec}"]
    facts += [f"{row.num_prefix_hit_tokens} from the prefix cache"] * bool(row.num_prefix_hit_tokens)
    if row.num_drafts_scheduled:
        facts.append(f"{row.num_drafts_accepted or 0} of {row.num_drafts_scheduled} drafts accepted")
    facts += [f"blocks +{row.blocks_allocated} −{row.blocks_freed}"] * bool(row.blocks_allocated or row.blocks_freed)
    happened = what_happened(row)
    yield from _wrap(f"{_INDENT}{'; '.join(facts)}{f'; {happened}' if happened else ''}", width, _INDENT)
    if step.returned is not None and not step.has_note:
        yield f"{_INDENT}the log has no note of this step: its time is that from plan to result"


def _total(life: Life, spans: Sequence[Span], width: int | None) -> Iterator[str]:
    """The stages of all steps, less what overlaps, and all waits are the wall time; if not, it says so."""
    steps = [span.step for span in spans if span.step is not None]
    sums: dict[str, float] = {}
    for span in spans:
        if span.step is None:
            sums[span.stage] = sums.get(span.stage, 0.0) + span.seconds
    sums["schedule"] = sum(step.schedule_s for step in steps)
    sums["hand-over"] = sum(step.hand_over_s for step in steps)
    sums["execute"] = sum(step.execute_s for step in steps)
    sums["sample"] = sum(step.sample_s for step in steps)
    sums["publish"] = sum(step.publish_s for step in steps)
    unnoted = sum(step.total_s for step in steps if not step.has_note) - sum(
        step.hand_over_s + step.execute_s + step.sample_s for step in steps if not step.has_note
    )
    overlap = sum(step.total_s for step in steps) - sum(span.seconds for span in spans if span.step is not None)
    total = sum(sums.values()) + unnoted - overlap
    parts = " + ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in sums.items())
    less = f" − overlap {overlap * 1e3:.3f}" if abs(overlap) >= 5e-7 else ""
    yield ""
    yield from _wrap(f"{parts}{less}", width, "  ")
    yield click.style(
        f"total {total * 1e3:.3f} ms; wall time, arrival to end, {life.wall_s * 1e3:.3f} ms; "
        f"difference {abs(total - life.wall_s) * 1e3:.3f} ms",
        bold=True,
    )


def _rows(number: int) -> str:
    return f"{number} row{'s' * (number != 1)}"


def ranges(numbers: Sequence[int]) -> str:
    """ "80–95, 112": runs of numbers that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(_range(first, last) for first, last in runs[:_SHOWN_RANGES])
    return shown + (f", … {len(runs) - _SHOWN_RANGES} more runs" if len(runs) > _SHOWN_RANGES else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _wrap(line: str, width: int | None, indent: str) -> Iterator[str]:
    if width is None or len(line) <= width:
        yield line
    else:
        yield from textwrap.wrap(line, width, subsequent_indent=indent, drop_whitespace=True)
