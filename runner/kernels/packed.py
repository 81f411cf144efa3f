"""A quantised matrix laid out once for the products: panels of 16 outputs, one after the other.

        panel    [codes: inputs in order, four of each output together][scales: 16 for each group][minima][fill]
        4 bits   64 bytes hold 8 inputs: 0-3 of each output in the lower halves of its four bytes, 4-7 in the upper ones
        8 bits   64 bytes hold 4 inputs

Codes are unsigned, scales and minima float16. Invariant: `unpacked(pack(m))` is m, its scales rounded to float16.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F

from runner.weights.quantized import QuantizedMatrix

PANEL = 16
_ALIGNMENT = 64


class PackedMatrix(msgspec.Struct, frozen=True):
    """`panels` uint8 [panels, bytes of one]."""

    panels: torch.Tensor
    outputs: int
    inputs: int
    bits: int
    group: int
    has_minima: bool


def pack(matrix: QuantizedMatrix) -> PackedMatrix:
    outputs, inputs = matrix.shape
    pad = (0, 0, 0, -outputs % PANEL)
    parts = [_packed_codes(F.pad(matrix.codes, pad), matrix.bits)]
    for numbers in (matrix.scales, matrix.minima):
        if numbers is not None:
            columns = F.pad(numbers.half(), pad).view(-1, PANEL, inputs // matrix.group).transpose(1, 2)
            parts.append(columns.reshape(len(columns), -1).view(torch.uint8))
    fill = -sum(part.shape[1] for part in parts) % _ALIGNMENT
    panels = F.pad(torch.cat(parts, 1), (0, fill))
    return PackedMatrix(panels, outputs, inputs, matrix.bits, matrix.group, matrix.minima is not None)


def unpacked(panels: torch.Tensor, inputs: int, bits: int, group: int, has_minima: bool) -> torch.Tensor:
    """float32 [panels, PANEL, inputs]: the weights themselves."""
    code_bytes, groups = inputs * PANEL * bits // 8, inputs // group
    codes = panels[:, :code_bytes].view(len(panels), -1, PANEL, 4)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1, 2)
    numbers = panels[:, code_bytes : code_bytes + groups * PANEL * 2 * (1 + has_minima)]
    scales = numbers.contiguous().view(torch.float16).view(len(panels), -1, groups, PANEL).transpose(2, 3).float()
    weights = codes.transpose(1, 2).reshape(len(panels), PANEL, groups, group).float()
    if has_minima:
        weights = weights * scales[:, 0, ..., None] + scales[:, 1, ..., None]
    else:
        weights = (weights - (1 << (bits - 1))) * scales[:, 0, ..., None]
    return weights.flatten(2)


def _packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [outputs, inputs], whole panels → [panels, bytes]."""
    if bits == 4:
        pairs = codes.view(len(codes), -1, 2, 4)
        codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    return codes.view(-1, PANEL, codes.shape[1] // 4, 4).transpose(1, 2).reshape(len(codes) // PANEL, -1)
