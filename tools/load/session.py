"""One measurement from its flags to its report: model, vocabulary, warm-up, run."""

from __future__ import annotations

import io
import time
from functools import partial

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tools.load.client import LoadClient, ServerRefused, first_model, load_session, sample_lag
from tools.load.report import Report, Run, report_of
from tools.load.sample import Sample
from tools.load.table import print_table
from tools.load.workload import Workload

TABLE_WIDTH = 100


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    concurrency: int
    requests: int
    input_len: int
    output_len: int
    model: str | None
    warm_up: int
    api_key: str | None
    seed: int


async def measure(plan: Plan) -> Report:
    """Raises ServerRefused when there is nothing to measure."""
    clock = time.perf_counter
    base = base_of(plan.url)
    lags: list[float] = []
    async with load_session(plan.api_key, clock) as session:
        model = {"id": plan.model} if plan.model is not None else await first_model(session, base)
        _check_length(plan, model.get("max_model_len"))
        client = LoadClient(session, base, str(model["id"]), clock)
        workload = Workload(
            requests=plan.requests,
            input_len=plan.input_len,
            output_len=plan.output_len,
            vocabulary=await client.vocabulary(),
            seed=plan.seed,
        )
        with _progress() as progress:
            warm_up = progress.add_task("warm-up", total=plan.warm_up, failed="")
            tick = partial(_advance, progress, warm_up)
            shape = msgspec.structs.replace(workload, requests=plan.warm_up)
            await client.run(shape, plan.concurrency, warm_up=True, done=tick)
            measured = progress.add_task("requests", total=plan.requests, failed="")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sample_lag, clock, lags)
                done = partial(_advance, progress, measured)
                samples = await client.run(workload, plan.concurrency, warm_up=False, done=done)
                tasks.cancel_scope.cancel()
    run = Run(
        url=base,
        model=str(model["id"]),
        concurrency=plan.concurrency,
        input_len=plan.input_len,
        output_len=plan.output_len,
        seed=plan.seed,
    )
    return report_of(run, samples, lags)


def base_of(url: str) -> str:
    """With a scheme, and without the /v1 that the ready line ends in."""
    base = url if "://" in url else f"http://{url}"
    return base.rstrip("/").removesuffix("/v1")


def printed(report: Report, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(report).decode() + "\n"
    console = Console(file=io.StringIO(), width=TABLE_WIDTH, force_terminal=False)
    print_table(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _check_length(plan: Plan, longest: object) -> None:
    if isinstance(longest, int) and plan.input_len + plan.output_len > longest:
        raise ServerRefused(
            f"{plan.input_len} tokens in and {plan.output_len} out are {plan.input_len + plan.output_len}, "
            f"more than the model's {longest}"
        )


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("[red]{task.fields[failed]}"), console=Console(stderr=True))


def _advance(progress: Progress, task: TaskID, sample: Sample) -> None:
    progress.advance(task)
    if sample.failure is not None:
        progress.update(task, failed=f"last failure: {sample.failure[:120]}")
