"""Hand-made batches over a poisoned pool: whatever a row may not read is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from runner.device import Device
from runner.kernels.cpu.backend import TIERS, CpuKernels, load
from runner.kernels.errors import BackendUnavailable
from runner.kv_pool import KVPool
from runner.kv_quantisation import quantise


@pytest.fixture(scope="session")
def native() -> CpuKernels:
    try:
        return load(Device("cpu", "bfloat16", 0))
    except BackendUnavailable as error:  # the machines of this project have a compiler
        pytest.fail(str(error))


# Of its own it has the products of quantised matrices only, and shares those with the one above it.
VNNI = "avx512vnni"


@pytest.fixture(params=[tier for tier in TIERS if tier != VNNI])
def tier(request: pytest.FixtureRequest, native: CpuKernels) -> Iterator[str]:
    """Each set of instructions that this CPU has; in the place of one that it has not stands the best once more."""
    yield from _with_tier(request, native)


@pytest.fixture(params=[VNNI, *TIERS[2:]])
def quantized_tier(request: pytest.FixtureRequest, native: CpuKernels) -> Iterator[str]:
    """Likewise, for products of quantised matrices."""
    yield from _with_tier(request, native)


def _with_tier(request: pytest.FixtureRequest, native: CpuKernels) -> Iterator[str]:
    best = native.tier
    native.use_tier(request.param)
    yield native.tier
    native.use_tier(best)


class Case(msgspec.Struct, frozen=True):
    """`rows`: (tokens before this step, tokens of this step)."""

    rows: Sequence[tuple[int, int]]
    kv_heads: int = 1
    group_size: int = 3
    head_size: int = 64
    block_size: int = 16
    layers: int = 2


class Inputs(msgspec.Struct):
    qkv: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    angles: torch.Tensor
    positions: torch.Tensor
    stored: torch.Tensor
    scales: torch.Tensor | None = None

    def attention(self, layer: int) -> tuple[torch.Tensor | int | float, ...]:
        scale = self.pool.shape[-1] ** -0.5
        own = self.qkv, self.pool, self.block_tables, self.starts, self.contexts, layer, scale
        return own if self.scales is None else (*own, self.scales)

    def storing(self, layer: int) -> tuple[torch.Tensor | int, ...]:
        own = self.qkv, self.angles, self.positions, self.pool, self.stored, layer
        return own if self.scales is None else (*own, self.scales)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0, layer: int = 1) -> Inputs:
    """The pool holds keys and values of every token up to each row's last, in `layer`; all else is NaN."""
    generator = torch.Generator().manual_seed(seed)
    ends = [context + count for context, count in case.rows]
    num_blocks = [-(-end // case.block_size) for end in ends]
    total = 1 + sum(num_blocks)
    shape = (total, case.kv_heads, case.layers, 2, case.block_size, case.head_size)
    pool = torch.full(shape, torch.nan, dtype=dtype)
    ids = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(ends), max(num_blocks), dtype=torch.int32)
    stored: list[int] = []
    for table, end, count, (context, _) in zip(tables, ends, num_blocks, case.rows, strict=True):
        for index in range(count):
            block = ids.pop()
            table[index] = block
            held = min(case.block_size, end - index * case.block_size)
            pool[block, :, layer, :, :held] = torch.randn(
                case.kv_heads, 2, held, case.head_size, generator=generator
            ).to(dtype)
        for position in range(context, end):
            block, offset = int(table[position // case.block_size]), position % case.block_size
            for head in range(case.kv_heads):
                tile = (block * case.kv_heads + head) * case.layers * 2
                stored.append(tile * case.block_size + offset)
    counts = [count for _, count in case.rows]
    heads = case.kv_heads * case.group_size
    angles = torch.arange(max(ends)).float()[:, None] * torch.rand(case.head_size // 2, generator=generator)
    return Inputs(
        qkv=torch.randn(sum(counts), (heads + 2 * case.kv_heads) * case.head_size, generator=generator).to(dtype),
        pool=pool,
        block_tables=tables,
        starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        contexts=torch.tensor([context for context, _ in case.rows], dtype=torch.int32),
        angles=torch.cat((angles.cos(), angles.sin()), -1).to(dtype),
        positions=torch.cat([torch.arange(context, context + count) for context, count in case.rows]),
        stored=torch.tensor(stored),
    )


def in_int8(given: Inputs) -> Inputs:
    """The same with an int8 pool as an engine has it; whatever a row may not read has the scale NaN."""
    blocks, kv_heads, layers, _, block_size, head_size = given.pool.shape
    pool = KVPool(
        Device("cpu", "bfloat16", torch.get_num_threads()),
        num_blocks=blocks,
        kv_heads=kv_heads,
        layers=layers,
        block_size=block_size,
        head_size=head_size,
        kv_dtype="int8",
    )
    assert pool.scales is not None
    quantised, scales = quantise(given.pool)
    pool.tensor.copy_(torch.where(scales.isnan()[..., None], -128, quantised))
    pool.scales.copy_(scales)
    return msgspec.structs.replace(given, pool=pool.tensor, scales=pool.scales)
