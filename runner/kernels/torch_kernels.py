"""The kernels of every device that has none of its own: plain torch, with attention by grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F

from runner.attention.paged import PagedAttention
from runner.batch import Batch
from runner.device import Device, Embedding, Linear
from runner.kernels import packed_products, reference
from runner.kernels.kernels import Attention, Weight
from runner.kernels.packed import pack
from runner.kv_pool import KVPool
from runner.sampling import Draw, sample
from runner.weights.quantized import QuantizedMatrix


class TorchKernels:
    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        return "plain torch"

    def pack(self, matrix: torch.Tensor | QuantizedMatrix) -> Weight:
        if isinstance(matrix, torch.Tensor):
            return matrix
        packed = pack(matrix)
        return msgspec.structs.replace(packed, panels=packed.panels.to(self._device.torch))

    def linear(self, weight: Weight, *, to_float32: bool = False) -> Linear:
        """A packed matrix is expanded anew in every product: slow on a CPU, but never in memory as a whole model."""
        if not isinstance(weight, torch.Tensor):
            return packed_products.linear(weight, to_float32)
        product = self._device.linear(weight)
        return (lambda x: product(x).float()) if to_float32 else product

    def embedding(self, weight: Weight) -> Embedding:
        if isinstance(weight, torch.Tensor):
            return lambda token_ids: F.embedding(token_ids, weight)
        return packed_products.embedding(weight, self._device)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return reference.add_rms_norm(residual, delta, weight, epsilon)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return reference.swiglu(gate_up)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return sample(logits, draws, self._device)

    def attention(self, pool: KVPool, batch: Batch, angles: torch.Tensor) -> Attention:
        return PagedAttention(pool, self._device, batch, angles)
