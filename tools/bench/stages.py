"""The stages of a step: what each could take at best on this machine, and what it took.

A floor is the longest of what the stage cannot do without: bytes from memory at the rate at which this machine reads
them, bytes that the caches hold at theirs, operations at the rate of large products; and each of its calls costs what a
call of the smallest kernel costs. All of it is measured in the same run, by the best of several ways, so a floor can be
missed but hardly undercut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from actors.messages.model import ModelDescription
from runner.device import Device
from runner.kernels.kernels import Kernels
from runner.kernels.packed_dense import PackedDense
from runner.model_runner import ModelRunner
from runner.weights.gguf_header import read_gguf_header

_READ_BYTES, _CACHED_BYTES = 1 << 28, 1 << 19
_ROW_WIDTH, _PRODUCT_SIZE, _PRODUCT_ROWS = 1024, 2048, 1024
_TIMES = 8
# Activations of one call that are larger than this do not stay in the caches until the next stage reads them.
_CACHE_BYTES = 16 << 20


class Shape(msgspec.Struct, frozen=True):
    """`rows` requests, each computing `tokens` behind `context`."""

    rows: int
    context: int
    tokens: int

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"decode, batch {self.rows}, context {self.context}"
        return f"prefill of {self.tokens}" + (f" behind {self.context}" if self.context else "")


class Machine(msgspec.Struct, frozen=True):
    """Rates of all threads together, per second."""

    bytes_from_memory: float
    bytes_from_cache: float
    operations: float
    call_s: float

    def floor(self, calls: int, num_bytes: float, operations: float = 0) -> float:
        return calls * self.call_s + max(num_bytes / self.bytes_from_memory, operations / self.operations)

    def activations(self, calls: int, bytes_per_call: float) -> float:
        rate = self.bytes_from_cache if bytes_per_call <= _CACHE_BYTES else self.bytes_from_memory
        return calls * (self.call_s + bytes_per_call / rate)

    def __str__(self) -> str:
        return (
            f"{self.bytes_from_memory / 1e9:.1f} GB/s from memory, {self.bytes_from_cache / 1e9:.0f} GB/s from the "
            f"caches, {self.operations / 1e12:.2f} T operations/s, {self.call_s * 1e6:.1f} µs per call"
        )


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_of(times: int, *ways: Callable[[], object]) -> float:
    """The least seconds of any of the ways, tried in turn."""
    return min(seconds_of(way) for _ in range(times) for way in ways)


class Reader:
    """Reads a stretch of memory that no cache holds, in the best way we have."""

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self._values = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
        dense = torch.ones(_READ_BYTES // (_ROW_WIDTH * device.dtype.itemsize), _ROW_WIDTH, dtype=device.dtype)
        weight = kernels.pack(dense)
        self._kept_bytes = weight.packed.nbytes if isinstance(weight, PackedDense) else dense.nbytes
        self.bytes_per_weight = self._kept_bytes / dense.numel()
        self._product = kernels.linear(weight)
        self._one = torch.ones(1, _ROW_WIDTH, dtype=device.dtype)

    @torch.inference_mode()
    def bytes_per_second(self, times: int = 1) -> float:
        return max(
            self._values.nbytes / best_of(times, self._values.sum),
            self._kept_bytes / best_of(times, lambda: self._product(self._one)),
        )


@torch.inference_mode()
def measure_machine(device: Device, kernels: Kernels, reader: Reader) -> Machine:
    """The best of several: a floor is what the machine can do, not what it does beside its neighbours."""
    weight = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=device.dtype)
    left = torch.ones(_PRODUCT_ROWS, _PRODUCT_SIZE, dtype=device.dtype)
    ours, torchs = kernels.linear(kernels.pack(weight)), device.linear(weight)
    least = torch.ones(1, 2, dtype=device.dtype)
    multiplied = best_of(_TIMES, lambda: ours(left), lambda: torchs(left))
    return Machine(
        reader.bytes_per_second(_TIMES),
        _bytes_from_cache(),
        2.0 * _PRODUCT_ROWS * _PRODUCT_SIZE**2 / multiplied,
        best_of(8 * _TIMES, lambda: kernels.swiglu(least)),
    )


def _bytes_from_cache() -> float:
    """One thread's rate, times the threads: torch's would have to be woken up for so little."""
    threads = torch.get_num_threads()
    cached = torch.ones(_CACHED_BYTES // 4, dtype=torch.float32)
    torch.set_num_threads(1)
    try:
        return threads * _CACHED_BYTES / best_of(8 * _TIMES, cached.sum, cached.amax)
    finally:
        torch.set_num_threads(threads)


class Held(msgspec.Struct, frozen=True):
    """Bytes as the engine holds them."""

    layers: float  # all weight matrices but the output head
    head: float
    token: float  # keys and values of one token
    value: int  # one activation

    def kv(self, shape: Shape) -> float:
        """All keys and values that the rows' last tokens see."""
        return shape.rows * (shape.context + shape.tokens) * self.token


def matrices(d: ModelDescription) -> tuple[int, int, int]:
    """Weights of a layer before its attention and behind it, and of the output head."""
    query, key = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    before, behind = d.hidden_size * (query + 2 * key), d.hidden_size * (query + 3 * d.intermediate_size)
    return before, behind, d.vocab_size * d.hidden_size


def held_dense(d: ModelDescription, dtype: torch.dtype, token_bytes: float, weight_bytes: float) -> Held:
    """`weight_bytes`: of one weight, as the kernels keep it."""
    before, behind, head = matrices(d)
    return Held(d.num_layers * (before + behind) * weight_bytes, head * weight_bytes, token_bytes, dtype.itemsize)


def held_stored(d: ModelDescription, dtype: torch.dtype, token_bytes: float) -> Held:
    """The matrices as the GGUF has them."""
    tensors = read_gguf_header(Path(d.weights)).tensors
    layers = sum(tensor.num_bytes for name, tensor in tensors.items() if name.startswith("blk."))
    head = tensors["token_embd.weight" if d.tie_word_embeddings else "output.weight"].num_bytes
    return Held(layers, head, token_bytes, dtype.itemsize)


def floors(shape: Shape, d: ModelDescription, held: Held, machine: Machine) -> dict[str, float]:
    """Seconds. Activations are counted once in and once out. Behind the last attention only `rows` tokens go on."""
    tokens, layers = shape.rows * shape.tokens, d.num_layers
    query, key = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    before, behind, head = matrices(d)
    products = layers * before * tokens + behind * ((layers - 1) * tokens + shape.rows)
    pairs = shape.rows * shape.tokens * (2 * shape.context + shape.tokens + 1) / 2

    def activations(calls: int, width: int) -> float:
        return machine.activations(calls, float(tokens * width * held.value))

    return {
        "weight products": machine.floor(4 * layers, held.layers, 2.0 * products),
        "attention": machine.floor(layers, held.kv(shape), 4.0 * layers * pairs * query),
        "rotation, KV write": activations(layers, 2 * query + 4 * key),
        "norms": activations(2 * layers + 1, 4 * d.hidden_size),
        "SwiGLU": activations(layers, 3 * d.intermediate_size),
        "output head": machine.floor(1, held.head, 2.0 * head * shape.rows),
        "sampling": machine.activations(1, 4.0 * shape.rows * d.vocab_size),
    }


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
