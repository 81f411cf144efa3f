"""`python -m tools.bench.step_profile`: where the time of one step goes, stage by stage, beside each stage's floor.

Floors and rates: stages.py. Behind the stages: the step over the time of its weight products alone and of one read of
its KV. Step, products and read take turns, so that what else the machine does meets all three.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec
import numpy as np
import torch

from actors.messages.model import ModelDescription
from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.device import Device
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from tools.bench.stages import (
    Held,
    Machine,
    Reader,
    Shape,
    Stopwatch,
    floors,
    held_dense,
    held_stored,
    measure_machine,
    seconds_of,
)

BLOCK_SIZE = 16
DECODES = (Shape(1, 300, 1), Shape(16, 300, 1), Shape(64, 150, 1))
PREFILLS = (Shape(1, 0, 256), Shape(1, 0, 1024))
SHAPES = {"decode": DECODES, "prefill": PREFILLS, "decode-16": DECODES[1:2]}


class Profile(msgspec.Struct, frozen=True):
    """Seconds, one value per round; `stages` by name."""

    shape: str
    steps: list[float]
    products: list[float]  # all weight products of the step, and nothing else
    reads: list[float]  # as many bytes of memory as its keys and values are
    stages: list[dict[str, float]]
    floors: dict[str, float]

    @property
    def ratios(self) -> list[float]:
        """The step over its weight products and one read of its KV."""
        rounds = zip(self.steps, self.products, self.reads, strict=True)
        return [step / (product + read) for step, product, read in rounds]


def plans(shape: Shape, vocabulary: int, round_: int) -> tuple[StepPlan, StepPlan]:
    """A step that makes the requests known, and the same step again for requests that are known."""
    generator = np.random.default_rng(round_)
    names = tuple(f"r{row}" for row in range(shape.rows))
    end = shape.context + shape.tokens
    num_blocks = -(-end // BLOCK_SIZE)
    tokens = generator.integers(100, vocabulary - 100, (shape.rows, end)).astype(np.int32)
    new = tuple(NewRequest(name, row.tobytes(), end, SamplingParams()) for name, row in zip(names, tokens, strict=True))
    blocks = np.arange(1, 1 + shape.rows * num_blocks, dtype=np.int32)

    def column(value: int) -> bytes:
        return np.full(shape.rows, value, np.int32).tobytes()

    first = StepPlan(
        step=0,
        request_ids=names,
        num_scheduled_tokens=column(shape.tokens),
        num_computed_tokens=column(shape.context),
        num_sampled=column(1),
        num_new_blocks=column(num_blocks),
        new_block_ids=blocks.tobytes(),
        new_requests=new,
    )
    again = msgspec.structs.replace(first, num_new_blocks=column(0), new_block_ids=b"", new_requests=())
    return first, again


def products_alone(runner: ModelRunner, d: ModelDescription, tokens: int, rows: int) -> Callable[[], None]:
    """All weight products of a step, one after the other, and nothing else."""
    model: Any = runner._model
    dtype = runner.kv_pool.dtype

    def ones(width: int) -> torch.Tensor:
        return torch.ones(tokens, width, dtype=dtype)

    hidden, heads, wide = ones(d.hidden_size), ones(d.num_heads * d.head_size), ones(d.intermediate_size)
    *products, last = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in model._layers]
    head = model._head

    @torch.inference_mode()
    def run() -> None:
        for qkv, output, gate_up, down in products:
            qkv(hidden), output(heads), gate_up(hidden), down(wide)
        qkv, output, gate_up, down = last
        qkv(hidden), output(heads[:rows]), gate_up(hidden[:rows]), down(wide[:rows])
        head(hidden[:rows])

    return run


def profile(
    runner: ModelRunner,
    d: ModelDescription,
    shape: Shape,
    held: Held,
    machine: Machine,
    reader: Reader,
    rounds: int,
) -> Profile:
    """Changes the runner for good: its stages are timed from here on."""
    watch = Stopwatch()
    alone = products_alone(runner, d, shape.rows * shape.tokens, shape.rows)
    plain_launch = runner.launch
    first, again = plans(shape, d.vocab_size, rounds)
    plain_launch(first)
    alone()
    steps, products, reads = [], [], []
    for _ in range(rounds):
        steps.append(seconds_of(lambda: plain_launch(again).result()))
        products.append(seconds_of(alone))
        reads.append(held.kv(shape) / reader.bytes_per_second())
    watch.instrument(runner)
    runner.launch(again)
    seen: list[dict[str, float]] = []
    for _ in range(rounds):
        watch.seconds = {}
        runner.launch(again)
        seen.append(watch.seconds)
    return Profile(str(shape), steps, products, reads, seen, floors(shape, d, held, machine))


def markdown(found: Profile, machine: str) -> str:
    """As docs/benchmarks.md has it."""
    medians = {
        stage: statistics.median(one.get(stage, 0.0) for one in found.stages)
        for stage in dict.fromkeys([*found.floors, *found.stages[0]])
    }
    lines = [f"**{found.shape}**: {_ms(statistics.median(found.steps))} ms (best {_ms(min(found.steps))})", ""]
    lines += ["| stage | ms | floor ms | times its floor |", "|---|--:|--:|--:|"]
    for stage, seconds in medians.items():
        floor = found.floors.get(stage)
        beside = " | |" if floor is None else f" {_ms(floor)} | {seconds / floor:.1f} |"
        lines.append(f"| {stage} | {_ms(seconds)} |{beside}")
    lines += [
        "",
        f"Weight products alone {_ms(statistics.median(found.products))} ms, one read of its KV "
        f"{_ms(statistics.median(found.reads))} ms: the step is **{statistics.median(found.ratios):.2f}** times both. "
        f"Machine: {machine}.",
    ]
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--kv-dtype", default="auto", show_default=True, type=click.Choice(["auto", "int8"]))
@click.option("--weights", default="dense", show_default=True, type=click.Choice(["dense", "stored"]))
@click.option("--threads", default=0, help="0: all cores.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--only", type=click.Choice(list(SHAPES)))
@click.option("--json", "as_json", is_flag=True, help="One JSON object per shape.")
@click.option(
    "--trace", is_flag=True, help="Instead: one decode step as torch's profiler sees it, operator by operator."
)
def main(
    model: str,
    dtype: str,
    weights: str,
    kv_dtype: str,
    threads: int,
    rounds: int,
    only: str | None,
    as_json: bool,
    trace: bool,
) -> None:
    """The stages of decode and prefill steps."""
    description = resolve(model)
    for shape in SHAPES[only] if only else (*DECODES, *PREFILLS):
        num_blocks = 1 + shape.rows * -(-(shape.context + shape.tokens) // BLOCK_SIZE)
        runner = ModelRunner(
            description,
            device="cpu",
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            threads=threads,
        )
        if trace:
            first, again = plans(shape, description.vocab_size, rounds)
            runner.launch(first)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                runner.launch(again)
            print(f"{shape}\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=20)}")
            continue
        device = Device("cpu", dtype, threads)
        reader = Reader(device, runner._kernels)
        machine = measure_machine(device, runner._kernels, reader)
        token_bytes = runner.kv_pool.block_bytes / BLOCK_SIZE
        if weights == "stored":
            held = held_stored(description, device.dtype, token_bytes)
        else:
            held = held_dense(description, device.dtype, token_bytes, reader.bytes_per_weight)
        found = profile(runner, description, shape, held, machine, reader, rounds)
        if as_json:
            print(msgspec.json.encode(found).decode(), flush=True)
        else:
            print(markdown(found, f"{machine}, {torch.get_num_threads()} threads"), flush=True)


if __name__ == "__main__":
    # As an engine's worker runs: else torch's threads look for work long after theirs is done, on our threads' cores.
    # torch looks at it before this line is reached.
    if "OMP_WAIT_POLICY" not in os.environ:
        command = [sys.executable, "-P", "-m", "tools.bench.step_profile", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    main()
