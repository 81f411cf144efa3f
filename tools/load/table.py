"""A report as a person reads it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.load.report import Distribution, Report


def table_of(report: Report) -> RenderableType:
    latencies = Table(title=f"{report.model} at {report.url}", title_justify="left")
    latencies.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        latencies.add_column(name, justify="right")
    rows: list[tuple[str, Distribution | None]] = [
        ("time to first token", report.time_to_first_token_s),
        ("time between tokens (each request's mean)", report.time_between_tokens_s),
        ("time between chunks (every gap)", report.time_between_chunks_s),
        ("end to end", report.end_to_end_s),
        ("wait for a connection (not in the above)", report.connection_wait_s),
        ("lag of this client's loop", report.client_lag_s),
    ]
    for name, values in rows:
        cells = (
            ["–"] * 4
            if values is None
            else [f"{v * 1e3:.1f}" for v in (values.mean, values.p50, values.p90, values.p99)]
        )
        latencies.add_row(name, *cells)
    lines = [
        f"{report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s "
        f"at concurrency {report.concurrency} ({report.input_len} in, {report.output_len} out)",
        f"{report.completed} of {report.requests} requests completed in {report.duration_s:.2f} s, "
        f"{report.failed} failed",
    ]
    lines += [f"  {count} × {reason}" for reason, count in report.failures.items()]
    parts: list[RenderableType] = [latencies, Text("\n".join(lines))]
    if report.verdict != "ok":
        parts.append(Text(f"verdict: {report.verdict}", style="bold red"))
    return Group(*parts)


def print_table(report: Report, console: Console) -> None:
    console.print(table_of(report))
