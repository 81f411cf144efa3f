"""The native CPU kernels: the library is built when it is not there yet, loaded once, and called as operators.

What one step's attention needs of the batch goes to int32 tensors once; every layer hands the same ones over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import torch

import runner.kernels.operators  # noqa: F401  (defines torch.ops.kvyard)
from runner.batch import Batch
from runner.device import Device
from runner.kernels.cpu.build import built
from runner.kernels.cpu.large_pages import LargePages
from runner.kernels.errors import BackendUnavailable
from runner.kernels.kernels import Attention, Weight
from runner.kernels.packed import PackedMatrix
from runner.kernels.packed_dense import INPUTS, PackedDense
from runner.kernels.torch_kernels import TorchKernels
from runner.kv_pool import KVPool
from runner.sampling import Draw, keys_of
from runner.store.cache import default_cache
from runner.weights.quantized import QuantizedMatrix

_MOST_HEAD_SIZE = 256  # kMaxHeadSize of kernels.h
_PAYS = 0.8  # of a matrix' bytes; without outliers it is 0.75
TIERS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")


class NativeAttention:
    def __init__(self, pool: KVPool, batch: Batch, angles: torch.Tensor) -> None:
        self._pool, self._scales, self._angles = pool.tensor, pool.scales, angles
        self._positions, self._stored = batch.positions, batch.stored
        self._tables, self._starts, self._contexts = map(torch.from_numpy, batch.rows.columns())
        self._scale = pool.tensor.shape[-1] ** -0.5
        operators = torch.ops.kvyard
        self._rotate_and_store = operators.rotate_and_store.default
        self._paged_attention = operators.paged_attention.default

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        self._rotate_and_store(qkv, self._angles, self._positions, self._pool, self._stored, layer, self._scales)
        attended: torch.Tensor = self._paged_attention(
            qkv, self._pool, self._tables, self._starts, self._contexts, layer, self._scale, self._scales
        )
        return attended


class CpuKernels(TorchKernels):
    """Plain torch, but for what the library has."""

    def __init__(self, library: ctypes.CDLL, device: Device) -> None:
        super().__init__(device)
        self._library, self._large_pages = library, LargePages()
        library.kvyard_tier.restype = ctypes.c_char_p
        library.kvyard_use_tier.restype = ctypes.c_bool
        library.kvyard_multiplies.restype = ctypes.c_bool
        self._add_rms_norm = torch.ops.kvyard.add_rms_norm.default
        self._draw = torch.ops.kvyard.draw.default
        self._swiglu = torch.ops.kvyard.swiglu.default

    @property
    def name(self) -> str:
        return f"native CPU kernels, {self.tier}"

    @property
    def tier(self) -> str:
        """Which instructions are used, one of TIERS."""
        return str(self._library.kvyard_tier().decode())

    def use_tier(self, tier: str) -> bool:
        """For the whole process. False when this CPU does not have it."""
        return bool(self._library.kvyard_use_tier(tier.encode()))

    @property
    def has_own_products(self) -> bool:
        """Of bfloat16 weights: a row's result then depends on the row alone. With AMX, oneDNN's are faster."""
        return bool(self._library.kvyard_multiplies())

    def pack(self, matrix: torch.Tensor | QuantizedMatrix) -> Weight:
        if isinstance(matrix, torch.Tensor):
            return self._packed_dense(matrix)
        weight = super().pack(matrix)
        assert isinstance(weight, PackedMatrix)
        return msgspec.structs.replace(weight, panels=self._large_pages.copy(weight.panels))

    def _packed_dense(self, matrix: torch.Tensor) -> torch.Tensor | PackedDense:
        """In fewer bytes where we have products for that and it pays: it would not for exponents like noise."""
        outputs, inputs = matrix.shape
        if matrix.dtype is not torch.bfloat16 or inputs % INPUTS or not self.has_own_products:
            return matrix
        packed = torch.ops.kvyard.pack_weight.default(matrix)
        if packed.nbytes > _PAYS * matrix.nbytes:
            return matrix
        return PackedDense(self._large_pages.copy(packed), outputs, inputs)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        normed: torch.Tensor = self._add_rms_norm(residual, delta, weight, epsilon)
        return normed

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self._swiglu(gate_up)
        return activated

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        rows, vocabulary = logits.shape
        temperatures, top_p = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        top_k, keys = np.full(rows, vocabulary, np.int64), np.zeros((rows, 2), np.int32)
        drawn = [row for row, draw in enumerate(draws) if not draw.greedy]
        for row in drawn:
            sampling = draws[row].sampling
            temperatures[row], top_p[row] = sampling.temperature, sampling.top_p
            if sampling.top_k > 0:
                top_k[row] = sampling.top_k
        if drawn:
            keys[drawn] = keys_of([draws[row] for row in drawn])
        chosen: torch.Tensor = self._draw(logits, *map(torch.from_numpy, (temperatures, top_k, top_p, keys)))
        return chosen

    def attention(self, pool: KVPool, batch: Batch, angles: torch.Tensor) -> Attention:
        """Plain torch's for heads that are larger or odd."""
        head_size = pool.tensor.shape[-1]
        if head_size > _MOST_HEAD_SIZE or head_size % 2:
            return super().attention(pool, batch, angles)
        return NativeAttention(pool, batch, angles)


def load(device: Device) -> CpuKernels:
    """Raises BackendUnavailable."""
    return CpuKernels(_library(), device)


@cache
def _library() -> ctypes.CDLL:
    path = built(default_cache())
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(
            f"{path} cannot be loaded: {error}. Delete it; the next start builds it again"
        ) from error
