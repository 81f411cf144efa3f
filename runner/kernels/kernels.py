"""What the model asks of a device between its weight products: the face that every set of kernels has.

A set is chosen once per process (registry.py). The model and the runner know this file only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from runner.batch import Batch
from runner.device import Embedding, Linear
from runner.kernels.packed import PackedMatrix
from runner.kernels.packed_dense import PackedDense
from runner.kv_pool import KVPool
from runner.sampling import Draw
from runner.weights.quantized import QuantizedMatrix

Weight = torch.Tensor | PackedMatrix | PackedDense  # a matrix [out, in] as a device keeps it


class Attention(Protocol):
    """Where one forward pass puts its keys and values and what its queries look at."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [tokens, (heads + 2 · kv_heads) · head_size], a product that is given away → [tokens, heads · head_size].

        Queries and keys are turned by their positions; key and value of every token are stored; then each query sees
        its request's tokens up to itself.
        """


class Kernels(Protocol):
    @property
    def name(self) -> str:
        """For people: which set this is."""

    def pack(self, matrix: torch.Tensor | QuantizedMatrix) -> Weight:
        """On the device, as suits it and as `linear` and `embedding` take it."""

    def linear(self, weight: Weight, *, to_float32: bool = False) -> Linear:
        """x [tokens, in] → x · weightᵀ [tokens, out], in x's dtype or float32."""

    def embedding(self, weight: Weight) -> Embedding:
        """token_ids int64 [tokens] → those rows of `weight` [vocabulary, hidden], in the device's dtype."""

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """residual [tokens, hidden] += delta, in place; returns residual / rms(residual) · weight."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [tokens, 2 · intermediate], the gates first → silu(gate) · up [tokens, intermediate]."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """As runner/sampling.py says: logits float32 [rows, vocabulary], one draw each → int64 [rows]."""

    def attention(self, pool: KVPool, batch: Batch, angles: torch.Tensor) -> Attention:
        """For one batch. angles [positions, head_size]: cosines, then sines, see model/rope.py."""
