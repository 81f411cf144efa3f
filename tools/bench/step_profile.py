"""`python -m tools.bench.step_profile`: where the time of one step goes, stage by stage, beside each stage's floor.

The floor is what this machine could do at best in the same run: bytes over the measured bandwidth, or operations over
the measured rate of products, whichever takes longer. Last line: the step over its weight products and one read of its
KV.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from actors.messages.model import ModelDescription
from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.device import Device
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from runner.weights.gguf_header import read_gguf_header

BLOCK_SIZE = 16
_READ_BYTES, _PRODUCT_SIZE = 1 << 28, 2048


class Shape(msgspec.Struct, frozen=True):
    """`rows` requests, each computing `tokens` behind `context`."""

    rows: int
    context: int
    tokens: int

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"decode, batch {self.rows}, context {self.context}"
        return f"prefill of {self.tokens}" + (f" behind {self.context}" if self.context else "")


DECODES = (Shape(1, 300, 1), Shape(16, 300, 1), Shape(64, 150, 1))
PREFILLS = (Shape(1, 0, 256), Shape(1, 0, 1024), Shape(1, 0, 2048))


class Machine(msgspec.Struct, frozen=True):
    bytes_per_second: float
    operations_per_second: float

    def floor(self, num_bytes: float, operations: float = 0) -> float:
        return max(num_bytes / self.bytes_per_second, operations / self.operations_per_second)


class Stopwatch:
    """Wraps functions; seconds by stage. An inner stage's time is not its outer's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                elapsed = time.perf_counter() - started
                self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed - self._inner
                self._inner = outer + elapsed

        return call

    def instrument(self, runner: ModelRunner) -> None:
        """Every stage of the runner, from outside: the engine itself carries no clocks."""
        model: Any = runner._model
        for layer in model._layers:
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(layer, name, self.timed("weight products", getattr(layer, name)))
        model._head = self.timed("output head", model._head)
        model._kernels = runner._kernels = self._kernels(runner._kernels)
        for part, name in ((runner._builder, "build"), (runner._requests, "apply")):
            setattr(part, name, self.timed("plan to tensors", getattr(part, name)))
        runner._sample = self.timed("sampling", runner._sample)  # type: ignore[method-assign]
        runner.launch = self.timed("between the stages", runner.launch)  # type: ignore[method-assign]

    def _kernels(self, kernels: Any) -> Any:
        watch = self

        class Timed:
            name = kernels.name
            add_rms_norm = staticmethod(watch.timed("norms", kernels.add_rms_norm))
            sample = staticmethod(kernels.sample)
            swiglu = staticmethod(watch.timed("SwiGLU", kernels.swiglu))

            def attention(self, *arguments: Any) -> Any:
                attention = watch.timed("plan to tensors", kernels.attention)(*arguments)
                attention.attend = watch.timed("attention", attention.attend)
                if hasattr(attention, "_rotate_and_store"):
                    attention._rotate_and_store = watch.timed("rotation, KV write", attention._rotate_and_store)
                return attention

        return Timed()


def _best_of(times: int, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure_machine(device: Device) -> Machine:
    """The best of several: a floor is what the machine can do, not what it does beside its neighbours."""
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    weight = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=device.dtype)
    product = device.linear(weight)
    left = torch.ones(1024, _PRODUCT_SIZE, dtype=device.dtype)
    with torch.inference_mode():
        read = _best_of(8, memory.sum)
        multiplied = _best_of(8, lambda: product(left))
    return Machine(_READ_BYTES / read, 2.0 * 1024 * _PRODUCT_SIZE**2 / multiplied)


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


def stored_bytes(d: ModelDescription) -> tuple[int, int]:
    """Of the matrices as the GGUF has them: those of the layers, and the output head."""
    tensors = read_gguf_header(Path(d.weights)).tensors
    layers = sum(tensor.num_bytes for name, tensor in tensors.items() if name.startswith("blk."))
    return layers, tensors["token_embd.weight" if d.tie_word_embeddings else "output.weight"].num_bytes


def floors(
    shape: Shape, d: ModelDescription, dtype: torch.dtype, machine: Machine, stored: bool = False
) -> dict[str, float]:
    """Seconds. Activations are counted once in and once out. Of whole-number products the rate is that of `dtype`."""
    size, tokens = dtype.itemsize, shape.rows * shape.tokens
    query, key = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    per_layer = d.hidden_size * (2 * query + 2 * key + 3 * d.intermediate_size)
    weights, head = d.num_layers * per_layer, d.vocab_size * d.hidden_size
    weight_bytes, head_bytes = stored_bytes(d) if stored else (weights * size, head * size)
    end = shape.context + shape.tokens
    pairs = shape.rows * shape.tokens * (shape.context + end + 1) / 2

    def activations(width: int) -> float:
        return float(d.num_layers * tokens * width * size)

    return {
        "weight products": machine.floor(weight_bytes, 2.0 * weights * tokens),
        "attention": machine.floor(
            d.num_layers * shape.rows * end * 2 * key * size, 4.0 * d.num_layers * pairs * query
        ),
        "rotation, KV write": machine.floor(activations(2 * query + 4 * key)),
        "norms": machine.floor(activations(8 * d.hidden_size)),
        "SwiGLU": machine.floor(activations(3 * d.intermediate_size)),
        "output head": machine.floor(head_bytes, 2.0 * head * shape.rows),
        "sampling": machine.floor(4.0 * shape.rows * d.vocab_size),
    }


def products_alone(runner: ModelRunner, d: ModelDescription, tokens: int, rows: int) -> Callable[[], None]:
    """All weight products of a step, one after the other, and nothing else."""
    model: Any = runner._model
    dtype = runner.kv_pool.tensor.dtype
    hidden, heads = (
        torch.ones(tokens, d.hidden_size, dtype=dtype),
        torch.ones(tokens, d.num_heads * d.head_size, dtype=dtype),
    )
    wide, last = torch.ones(tokens, d.intermediate_size, dtype=dtype), hidden[:rows]
    products = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in model._layers]
    head = model._head

    @torch.inference_mode()
    def run() -> None:
        for qkv, output, gate_up, down in products:
            qkv(hidden), output(heads), gate_up(hidden), down(wide)
        head(last)

    return run


def profile(
    runner: ModelRunner, d: ModelDescription, shape: Shape, machine: Machine, rounds: int, stored: bool
) -> Table:
    watch = Stopwatch()
    alone = products_alone(runner, d, shape.rows * shape.tokens, shape.rows)
    plain_launch = runner.launch
    first, again = plans(shape, d.vocab_size, rounds)
    plain_launch(first)
    alone()
    steps, products = [], []
    for _ in range(rounds):
        steps.append(_best_of(1, lambda: plain_launch(again).result()))
        products.append(_best_of(1, alone))
    watch.instrument(runner)
    runner.launch(again)
    seen: list[dict[str, float]] = []
    for _ in range(rounds):
        watch.seconds = {}
        runner.launch(again)
        seen.append(watch.seconds)
    return _table(shape, floors(shape, d, runner.kv_pool.tensor.dtype, machine, stored), seen, steps, products)


def _table(
    shape: Shape,
    floor: dict[str, float],
    seen: Sequence[dict[str, float]],
    steps: Sequence[float],
    products: Sequence[float],
) -> Table:
    step, product = statistics.median(steps), statistics.median(products)
    table = Table(title=f"{shape}: {step * 1e3:.2f} ms (best {min(steps) * 1e3:.2f})")
    for column in ("stage", "ms", "floor ms", "times its floor"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in dict.fromkeys([*floor, *seen[0]]):
        seconds = statistics.median(one.get(stage, 0.0) for one in seen)
        least = floor.get(stage)
        shown = (f"{least * 1e3:.2f}", f"{seconds / least:.1f}") if least is not None else ("", "")
        table.add_row(stage, f"{seconds * 1e3:.2f}", *shown)
    limit = product + floor["attention"]
    ratio = statistics.median(one / (other + floor["attention"]) for one, other in zip(steps, products, strict=True))
    table.caption = (
        f"weight products alone {product * 1e3:.2f} ms; the step over them and one read of its KV "
        f"({limit * 1e3:.2f} ms): {ratio:.2f}"
    )
    return table


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--weights", default="dense", show_default=True, type=click.Choice(["dense", "stored"]))
@click.option("--threads", default=0, help="0: all cores.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--only", type=click.Choice(["decode", "prefill"]))
@click.option(
    "--trace", is_flag=True, help="Instead: one decode step as torch's profiler sees it, operator by operator."
)
def main(model: str, dtype: str, weights: str, threads: int, rounds: int, only: str | None, trace: bool) -> None:
    """The stages of decode and prefill steps."""
    description = resolve(model)
    shapes = {"decode": DECODES, "prefill": PREFILLS}
    console = Console(width=100)
    for shape in [shape for kind, group in shapes.items() if only in (None, kind) for shape in group]:
        num_blocks = 1 + shape.rows * -(-(shape.context + shape.tokens) // BLOCK_SIZE)
        runner = ModelRunner(
            description,
            device="cpu",
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            threads=threads,
            weights=weights,
        )
        if trace:
            first, again = plans(shape, description.vocab_size, rounds)
            runner.launch(first)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                runner.launch(again)
            print(f"{shape}\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=20)}")
            continue
        machine = measure_machine(Device("cpu", dtype, threads))
        table = profile(runner, description, shape, machine, rounds, weights == "stored")
        console.print(table)
        console.print(
            f"machine: {machine.bytes_per_second / 1e9:.1f} GB/s, "
            f"{machine.operations_per_second / 1e12:.2f} T operations/s, {torch.get_num_threads()} threads\n"
        )


if __name__ == "__main__":
    main()
