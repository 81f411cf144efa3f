"""`python -m tools.bench.compile`: torch.compile against our own kernels, the same model, in turn.

A step, plan to logits, in four ways: all kernels ours; plain torch; torch.compile on all that lies between two layers'
attention, which is ours (`pieces`); and on the whole pass of plain torch (`whole`, only when asked for: it compiles
for minutes). Weights are frozen, so that inductor lays them out for oneDNN itself. Besides a step's time: how long the
first call takes, and the first one with one more token, which a running engine meets in nearly every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import click
import msgspec
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F

from actors.messages.model import ModelDescription
from runner.batch import Batch
from runner.device import Device, Linear
from runner.kernels import reference
from runner.kernels.cpu.backend import load
from runner.kernels.kernels import Attention, Weight
from runner.kernels.torch_kernels import TorchKernels
from runner.kv_pool import KVPool
from runner.model.llama import LlamaModel
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from runner.weights.files import open_weights
from tools.bench.stages import Shape, seconds_of
from tools.bench.step_profile import BLOCK_SIZE, plans

DECODE, PREFILL = Shape(16, 300, 1), Shape(1, 0, 256)
SHAPES = (DECODE, PREFILL)
OURS, PLAIN, PIECES, WHOLE = "our kernels", "plain torch", "torch.compile, our attention", "torch.compile, all of it"
WAYS = {"pieces": PIECES, "whole": WHOLE}
_NUM_BLOCKS = 1 + 17 * 20


class Product(torch.nn.Module):
    """Its weight is a parameter: inductor freezes no other tensors."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class SeenThrough(TorchKernels):
    """Plain torch whose products inductor can see through."""

    def linear(self, weight: Weight, *, to_float32: bool = False) -> Linear:
        if not isinstance(weight, torch.Tensor):
            return super().linear(weight, to_float32=to_float32)
        product = Product(weight)
        return (lambda x: product(x).float()) if to_float32 else product


class InPieces:
    """The model's forward pass as compiled functions of tensors, with attention between them."""

    def __init__(self, model: LlamaModel) -> None:
        epsilon, layers = model._description.rms_norm_eps, model._layers

        def first(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = model._embed(token_ids)
            return hidden, layers[0].qkv(_norm(hidden, layers[0].attention_norm, epsilon))

        def behind(layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            hidden = hidden + layer.output(attended)
            down: torch.Tensor = layer.down(reference.swiglu(layer.gate_up(_norm(hidden, layer.mlp_norm, epsilon))))
            return hidden + down

        def between(layer: Any, following: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
            def piece(hidden: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                hidden = behind(layer, hidden, attended)
                return hidden, following.qkv(_norm(hidden, following.attention_norm, epsilon))

            # Compiled forms are kept by code object, few of each; so each layer has its own.
            piece.__code__ = piece.__code__.replace(co_name="piece")
            return torch.compile(piece)

        def last(hidden: torch.Tensor, attended: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            hidden = behind(layers[-1], hidden[wanted], attended[wanted])
            logits: torch.Tensor = model._head(_norm(hidden, model._norm, epsilon))
            return logits

        self._first, self._last = torch.compile(first), torch.compile(last)
        self._between = [between(layer, following) for layer, following in pairwise(layers)]

    def logits(self, token_ids: torch.Tensor, wanted: torch.Tensor, attention: Attention) -> torch.Tensor:
        hidden, qkv = self._first(token_ids)
        for index, piece in enumerate(self._between):
            hidden, qkv = piece(hidden, attention.attend(index, qkv))
        return self._last(hidden, attention.attend(len(self._between), qkv), wanted)


def _norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden.dtype) * weight


class Result(msgspec.Struct, frozen=True):
    """Seconds."""

    first: float
    another: float  # the first call with a token more
    steps: list[float]  # one per round


def runner_for(way: str, d: ModelDescription, device: Device, threads: int) -> ModelRunner:
    ours, plain = load(device), TorchKernels(device)
    kernels: Any = {OURS: ours, PLAIN: plain}.get(way) or SeenThrough(device)
    runner = ModelRunner(
        d, device="cpu", dtype="bfloat16", num_blocks=_NUM_BLOCKS, block_size=BLOCK_SIZE, threads=threads
    )
    with torch.inference_mode():
        model = LlamaModel(d, open_weights(d, device, False), device, kernels, d.context_length)
    attends = ours if way in (OURS, PIECES) else plain

    def all_of_it(token_ids: torch.Tensor, wanted: torch.Tensor, attention: Attention) -> torch.Tensor:
        return model.logits(model.forward(token_ids, wanted, attention))

    compute = {PIECES: InPieces(model).logits, WHOLE: torch.compile(all_of_it)}.get(way, all_of_it)

    def logits_of(batch: Batch, pool: KVPool, rows: torch.Tensor) -> torch.Tensor:
        return compute(batch.token_ids, rows, attends.attention(pool, batch, model.angles))

    model.logits_of = logits_of  # type: ignore[method-assign]
    runner._model, runner._kernels = model, kernels
    return runner


def another(shape: Shape) -> Shape:
    """A token more."""
    if shape.tokens == 1:
        return msgspec.structs.replace(shape, rows=shape.rows + 1)
    return msgspec.structs.replace(shape, tokens=shape.tokens + 1)


def measure(runners: dict[str, ModelRunner], d: ModelDescription, shape: Shape, rounds: int) -> dict[str, Result]:
    first: dict[str, float] = {}
    other: dict[str, float] = {}
    again: dict[str, Callable[[], object]] = {}
    steps: dict[str, list[float]] = {name: [] for name in runners}
    known, repeated = plans(shape, d.vocab_size, rounds)
    more, _ = plans(another(shape), d.vocab_size, rounds)
    for name, runner in runners.items():

        def compute(plan: Any, runner: ModelRunner = runner) -> object:
            return runner.compute(plan)

        first[name], other[name] = (seconds_of(lambda c=compute, p=plan: c(p)) for plan in (known, more))  # type: ignore[misc]
        compute(known)
        again[name] = lambda c=compute: c(repeated)  # type: ignore[misc]
        again[name]()
    for index in range(rounds):
        for name in list(runners) if index % 2 == 0 else reversed(list(runners)):
            steps[name].append(seconds_of(again[name]))
    return {name: Result(first[name], other[name], steps[name]) for name in runners}


def markdown(results: dict[Shape, dict[str, Result]]) -> str:
    """As docs/kernels.md has it. The ratio is the median of the rounds' own."""
    lines = ["| step | by | ms | times ours | first call | with a token more |", "|---|---|--:|--:|--:|--:|"]
    for shape, found in results.items():
        for name, result in found.items():
            ratio = statistics.median(a / b for a, b in zip(result.steps, found[OURS].steps, strict=True))
            lines.append(
                f"| {shape} | {name} | {statistics.median(result.steps) * 1e3:.1f} | {ratio:.2f} | "
                f"{result.first:.1f} s | {result.another:.1f} s |"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--threads", default=0, help="0: all cores. 1 on a machine with other work: torch's threads wait for each other."
)
@click.option("--way", "ways", type=click.Choice(list(WAYS)), multiple=True, default=["pieces"], show_default=True)
@torch.inference_mode()
def main(model: str, rounds: int, threads: int, ways: tuple[str, ...]) -> None:
    """A step by our kernels, by plain torch and by torch.compile. Needs a C++ compiler."""
    inductor.freezing = True
    d, device = resolve(model), Device("cpu", "bfloat16", threads)
    results = {}
    for shape in SHAPES:
        names = (OURS, PLAIN, *(WAYS[way] for way in ways))
        results[shape] = measure({name: runner_for(name, d, device, threads) for name in names}, d, shape, rounds)
        torch.compiler.reset()
    print(markdown(results))


if __name__ == "__main__":
    main()
