"""The kernels of every device that has none of its own: plain torch, with attention by grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.attention.paged import PagedAttention
from runner.batch import Batch
from runner.device import Device, Linear
from runner.kernels import reference
from runner.kv_pool import KVPool
from runner.sampling import Draw, sample


class TorchKernels:
    name = "plain torch"

    def __init__(self, device: Device) -> None:
        self._device = device

    def linear(self, weight: torch.Tensor) -> Linear:
        return self._device.linear(weight)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return reference.add_rms_norm(residual, delta, weight, epsilon)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return reference.swiglu(gate_up)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return sample(logits, draws, self._device)

    def attention(self, pool: KVPool, batch: Batch, angles: torch.Tensor) -> PagedAttention:
        return PagedAttention(pool, self._device, batch, angles)
