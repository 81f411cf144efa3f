"""`python -m tools.bench.serving`: prefill/decode against aggregated, on the same machine, taking turns.

Both deployments stand side by side all the time (an idle one costs about 1 % of a core), so a turn costs no start.
"""

from __future__ import annotations

import statistics
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.bench.processes import load, running

DEPLOYMENTS = {"aggregated": ("--prefill=0", "--decode=1"), "prefill/decode": ("--prefill=1", "--decode=1")}


def measure(
    rounds: int, concurrency: int, requests: int, input_len: int, output_len: int, flags: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    """The reports of `kvyard load`, by deployment, one per round."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in DEPLOYMENTS}
    with (
        running("up", *DEPLOYMENTS["aggregated"], *flags) as (aggregated, _),
        running("up", *DEPLOYMENTS["prefill/decode"], *flags) as (split, _),
    ):
        urls = {"aggregated": aggregated, "prefill/decode": split}
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


def table(title: str, reports: dict[str, list[dict[str, Any]]]) -> Table:
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
    ratios = [
        split["output_tokens_per_s"] / whole["output_tokens_per_s"]
        for whole, split in zip(reports["aggregated"], reports["prefill/decode"], strict=True)
    ]
    result.add_row("ratio, median of the rounds", f"{statistics.median(ratios):.2f}", "", "", "", style="bold")
    return result


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--input-len", default=256, show_default=True)
@click.option("--output-len", default=128, show_default=True)
@click.option("--flag", "flags", multiple=True, help="passed on to both deployments, such as --flag=--threads=2")
def main(rounds: int, input_len: int, output_len: int, flags: tuple[str, ...]) -> None:
    """Output tokens per second at concurrency 16 and 1; medians of alternating rounds."""
    for concurrency, requests in ((16, 48), (1, 4)):
        reports = measure(rounds, concurrency, requests, input_len, output_len, flags)
        title = f"concurrency {concurrency}, {input_len} in, {output_len} out, {rounds} rounds {' '.join(flags)}"
        Console().print(table(title, reports))


if __name__ == "__main__":
    main()
