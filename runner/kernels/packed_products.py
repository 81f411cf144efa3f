"""Products and look-ups with a packed matrix, through the operators: the device's kernels, or the reference."""

from __future__ import annotations

import torch

import runner.kernels.operators  # noqa: F401  (defines torch.ops.kvyard)
from runner.device import Device, Embedding, Linear
from runner.kernels.packed import PackedMatrix
from runner.kernels.packed_dense import PackedDense


def linear(weight: PackedMatrix | PackedDense, to_float32: bool) -> Linear:
    if isinstance(weight, PackedDense):
        return _dense_linear(weight, to_float32)
    multiply = torch.ops.kvyard.quantized_linear.default
    panels, outputs, form = weight.panels, weight.outputs, (weight.bits, weight.group, weight.has_minima)

    def quantized_linear(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(x, panels, outputs, *form, to_float32)
        return product

    return quantized_linear


def embedding(weight: PackedMatrix | PackedDense, device: Device) -> Embedding:
    like = torch.empty(weight.inputs, dtype=device.dtype, device=device.torch)
    if isinstance(weight, PackedDense):
        return _dense_embedding(weight, like)
    look_up = torch.ops.kvyard.quantized_embedding.default
    panels, form = weight.panels, (weight.bits, weight.group, weight.has_minima)

    def quantized_embedding(token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = look_up(token_ids, panels, like, *form)
        return rows

    return quantized_embedding


def _dense_linear(weight: PackedDense, to_float32: bool) -> Linear:
    multiply = torch.ops.kvyard.packed_linear.default
    packed, outputs = weight.packed, weight.outputs

    def packed_linear(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(x, packed, outputs, to_float32)
        return product

    return packed_linear


def _dense_embedding(weight: PackedDense, like: torch.Tensor) -> Embedding:
    look_up = torch.ops.kvyard.packed_embedding.default
    packed, outputs = weight.packed, weight.outputs

    def packed_embedding(token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = look_up(token_ids, packed, outputs, like)
        return rows

    return packed_embedding
