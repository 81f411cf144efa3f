"""Products and look-ups with a packed matrix, through the operators: the device's kernels, or the reference."""

from __future__ import annotations

from typing import Any

import torch

import runner.kernels.operators  # noqa: F401  (defines torch.ops.kvyard)
from runner.device import Device, Embedding, Linear
from runner.kernels.packed import PackedMatrix
from runner.kernels.packed_dense import PackedDense


def linear(weight: PackedMatrix | PackedDense, to_float32: bool) -> Linear:
    arguments: tuple[Any, ...]
    if isinstance(weight, PackedDense):
        multiply, arguments = torch.ops.kvyard.packed_linear.default, (weight.packed, weight.outputs, to_float32)
    else:
        multiply = torch.ops.kvyard.quantized_linear.default
        arguments = weight.panels, weight.outputs, *_form(weight), to_float32

    def packed_linear(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(x, *arguments)
        return product

    return packed_linear


def embedding(weight: PackedMatrix | PackedDense, device: Device) -> Embedding:
    like = torch.empty(weight.inputs, dtype=device.dtype, device=device.torch)
    arguments: tuple[Any, ...]
    if isinstance(weight, PackedDense):
        look_up, arguments = torch.ops.kvyard.packed_embedding.default, (weight.packed, weight.outputs, like)
    else:
        look_up, arguments = torch.ops.kvyard.quantized_embedding.default, (weight.panels, like, *_form(weight))

    def packed_embedding(token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = look_up(token_ids, *arguments)
        return rows

    return packed_embedding


def _form(weight: PackedMatrix) -> tuple[int, int, bool]:
    return weight.bits, weight.group, weight.has_minima
