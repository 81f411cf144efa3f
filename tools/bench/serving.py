"""`python -m tools.bench.serving`: two deployments on the same machine, taking turns.

By default prefill/decode against aggregated; `--compare depth` has an engine that plans ahead against one that waits,
`--compare kernels` one with our kernels against one with plain torch, as on a machine without a compiler.

Both deployments stand side by side all the time (an idle one costs about 1 % of a core), so a turn costs no start.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from tools.bench.processes import load, running
from tools.bench.rows import Measured


class Deployment(NamedTuple):
    """Flags of `kvyard up`, and what it finds in its environment besides ours."""

    flags: tuple[str, ...]
    environment: dict[str, str] = {}  # noqa: RUF012  (never changed)


# What is compared: each the deployment that is measured against, then the one of interest.
COMPARISONS: dict[str, dict[str, Deployment]] = {
    "arrangement": {
        "aggregated": Deployment(("--prefill=0", "--decode=1")),
        "prefill/decode": Deployment(("--prefill=1", "--decode=1")),
    },
    "depth": {
        "depth 1": Deployment(("--prefill=0", "--async-depth=1")),
        "depth 2": Deployment(("--prefill=0", "--async-depth=2")),
    },
    "kernels": {
        "plain torch": Deployment(("--prefill=0",), {"KVYARD_KERNELS": "torch"}),
        "native": Deployment(("--prefill=0",), {"KVYARD_KERNELS": "auto"}),
    },
}
Reports = dict[str, list[dict[str, Any]]]


def measure(
    deployments: dict[str, Deployment],
    rounds: int,
    concurrency: int,
    requests: int,
    input_len: int,
    output_len: int,
    flags: tuple[str, ...] = (),
) -> Reports:
    """The reports of `kvyard load`, by deployment, one per round."""
    reports: Reports = {name: [] for name in deployments}
    with ExitStack() as stack:
        urls = {}
        for name, deployment in deployments.items():
            environment = {**os.environ, **deployment.environment}
            started = stack.enter_context(running("up", *deployment.flags, *flags, environment=environment))
            urls[name] = started.url
        for index in range(rounds):
            for name in list(urls) if index % 2 == 0 else list(reversed(urls)):
                report = load(
                    urls[name],
                    concurrency=concurrency,
                    requests=requests,
                    input_len=input_len,
                    output_len=output_len,
                    seed=index,
                )
                reports[name].append(report)
    return reports


def disaggregated(rounds: int) -> Measured:
    """Output tokens per second: prefill/decode, then aggregated."""
    reports = measure(COMPARISONS["arrangement"], rounds, concurrency=16, requests=48, input_len=256, output_len=128)
    aggregated, ours = (tuple(row["output_tokens_per_s"] for row in rows) for rows in reports.values())
    return Measured(ours, aggregated)


def table(title: str, reports: Reports) -> Table:
    result = Table(title=title)
    for column in ("", "output tokens/s", "first token p50, ms", "between tokens p50, ms", "end to end p50, s"):
        result.add_column(column, justify="left" if not column else "right")
    for name, rows in reports.items():
        result.add_row(
            name,
            f"{statistics.median(row['output_tokens_per_s'] for row in rows):.1f}",
            f"{1e3 * statistics.median(row['time_to_first_token_s']['p50'] for row in rows):.0f}",
            f"{1e3 * statistics.median(row['time_between_tokens_s']['p50'] for row in rows):.1f}",
            f"{statistics.median(row['end_to_end_s']['p50'] for row in rows):.2f}",
        )
    against, of_interest = reports.values()
    ratios = [
        ours["output_tokens_per_s"] / other["output_tokens_per_s"]
        for other, ours in zip(against, of_interest, strict=True)
    ]
    result.add_row("ratio, median of the rounds", f"{statistics.median(ratios):.2f}", "", "", "", style="bold")
    return result


@click.command()
@click.option("--compare", type=click.Choice(list(COMPARISONS)), default="arrangement", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--input-len", default=256, show_default=True)
@click.option("--output-len", default=128, show_default=True)
@click.option("--flag", "flags", multiple=True, help="passed on to both deployments, such as --flag=--threads=2")
def main(compare: str, rounds: int, input_len: int, output_len: int, flags: tuple[str, ...]) -> None:
    """Output tokens per second at concurrency 16 and 1; medians of alternating rounds."""
    for concurrency, requests in ((16, 48), (1, 4)):
        reports = measure(COMPARISONS[compare], rounds, concurrency, requests, input_len, output_len, flags)
        title = f"concurrency {concurrency}, {input_len} in, {output_len} out, {rounds} rounds {' '.join(flags)}"
        Console().print(table(title, reports))


if __name__ == "__main__":
    main()
