"""`kvyard load`: measures a server with random prompts in a closed loop.

Exit codes: 0 when every request completed; 1 when one failed or the server cannot be measured; 3 when this client was
the bottleneck, so that the figures say nothing of the server. stdout gets the table or the JSON, stderr the progress.
"""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("url")
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="requests under way at once")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="requests in all")
@click.option("--input-len", type=click.IntRange(1), default=256, show_default=True, help="tokens of each prompt")
@click.option("--output-len", type=click.IntRange(1), default=128, show_default=True, help="tokens of each answer")
@click.option("--model", help="the model's id; default: the first of /v1/models")
@click.option("--warm-up", type=click.IntRange(0), help="requests before the measured ones; default: --concurrency")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of the table")
@click.option("--api-key", envvar="KVYARD_API_KEY", help="key to send; also KVYARD_API_KEY")
@click.option("--seed", type=int, default=0, show_default=True, help="of the random prompts")
def load(
    url: str,
    concurrency: int,
    requests: int,
    input_len: int,
    output_len: int,
    model: str | None,
    warm_up: int | None,
    as_json: bool,
    api_key: str | None,
    seed: int,
) -> None:
    """Measure the server at URL with random prompts in a closed loop.

    Each of --concurrency workers sends a prompt of random token ids to /v1/completions and its next one when the answer
    has ended. Tokens are counted by the server's usage.
    """
    from actors.kernel.run import run
    from tools.load.client import ServerRefused
    from tools.load.session import Plan, measure, printed

    plan = Plan(
        url=url,
        concurrency=concurrency,
        requests=requests,
        input_len=input_len,
        output_len=output_len,
        model=model,
        warm_up=concurrency if warm_up is None else warm_up,
        api_key=api_key,
        seed=seed,
    )
    try:
        report = run(measure, plan)
    except ServerRefused as error:
        click.echo(f"kvyard load: {error}", err=True)
        sys.exit(1)
    click.echo(printed(report, as_json), nl=False)
    if report.failed:
        sys.exit(1)
    if report.verdict != "ok":
        sys.exit(3)
