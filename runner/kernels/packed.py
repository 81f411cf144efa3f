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
_OUTPUTS_AT_ONCE = 128 * PANEL


class PackedMatrix(msgspec.Struct, frozen=True):
    """`panels` uint8 [panels, bytes of one]."""

    panels: torch.Tensor
    outputs: int
    inputs: int
    bits: int
    group: int
    has_minima: bool


def pack(matrix: QuantizedMatrix) -> PackedMatrix:
    """Slice by slice, so that beside the panels little memory is needed."""
    outputs, inputs = matrix.shape
    has_minima = matrix.minima is not None
    num_bytes = inputs * PANEL * matrix.bits // 8 + inputs // matrix.group * PANEL * 2 * (1 + has_minima)
    panels = torch.zeros(-(-outputs // PANEL), -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
    for first in range(0, outputs, _OUTPUTS_AT_ONCE):
        part = matrix.rows(first, first + _OUTPUTS_AT_ONCE)
        columns = [_packed_codes(part.codes, part.bits), _packed_numbers(part.scales)]
        if part.minima is not None:
            columns.append(_packed_numbers(part.minima))
        to = panels[first // PANEL :]
        torch.cat(columns, 1, out=to[: len(columns[0]), :num_bytes])
    return PackedMatrix(panels, outputs, inputs, matrix.bits, matrix.group, has_minima)


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
    """uint8 [outputs, inputs] → [panels, bytes]."""
    codes = _whole_panels(codes)
    if bits == 4:
        pairs = codes.view(len(codes), -1, 2, 4)
        codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    return codes.view(-1, PANEL, codes.shape[1] // 4, 4).transpose(1, 2).reshape(len(codes) // PANEL, -1)


def _packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """float32 [outputs, groups] → float16 of 16 outputs side by side, uint8 [panels, bytes]."""
    columns = _whole_panels(numbers.half()).view(-1, PANEL, numbers.shape[1]).transpose(1, 2)
    return columns.reshape(len(columns), -1).view(torch.uint8)


def _whole_panels(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
