"""A bfloat16 matrix in three quarters of its bytes, without loss: a single row waits for the bytes of its weights.

15 exponents serve all but a few in ten thousand weights of a trained matrix. So 4 bits say which of them a weight has,
8 more are its sign and mantissa; weights of other exponents, the outliers, stand in a list. One flat tensor of bytes:

        exponents   16 words, twice: a table of exponents in their place in a bfloat16, the first of them 0
        panels      of 16 outputs, one after the other. 192 bytes hold 8 inputs, which are four pairs:
                      32 words    4 bits for each pair, the first one's lowest: the exponent by its number in the table
                      4 · 32      sign and mantissa in a byte, pair by pair
                    both of output o and place p of the pair at 2 · o + p
        first       int32 [panels + 1]: where each panel's outliers begin, and the end; filled up to 64 bytes
        outliers    uint32 pairs: pair of inputs · 16 + output in its panel; the pair's two weights, zero for one that
                    is no outlier

Invariant: `unpacked(packed(weight), *weight.shape)` is the weight, to the bit.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F

from runner.kernels.packed import PANEL

INPUTS = 8  # side by side in a panel: those of a matrix are a multiple of it
_EXPONENTS, _FOUR_BYTES, _ALIGNMENT = 16, 192, 64


class PackedDense(msgspec.Struct, frozen=True):
    """`packed` uint8, as above."""

    packed: torch.Tensor
    outputs: int
    inputs: int


def pack(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 [outputs, inputs] → uint8. Of equally frequent exponents the table has the smaller ones."""
    outputs, inputs = weight.shape
    bits = F.pad(weight.contiguous().view(torch.int16), (0, 0, 0, -outputs % PANEL)).int() & 0xFFFF
    exponents = bits >> 7 & 255
    counts = torch.bincount(exponents[:outputs].flatten(), minlength=256)
    counts[0] = bits.numel() + 1
    table = counts.argsort(descending=True, stable=True)[:_EXPONENTS].int()
    codes = torch.full((256,), -1, dtype=torch.int32, device=weight.device)
    codes[table.long()] = torch.arange(_EXPONENTS, dtype=torch.int32, device=weight.device)
    code = codes[exponents.long()]
    outside = code < 0
    rest = torch.where(outside, 0, bits >> 8 & 0x80 | bits & 0x7F)
    # [panels, fours, pair, output, place]
    by_pair = (-1, PANEL, inputs // INPUTS, 4, 2)
    shifts = torch.arange(0, 16, 4, device=weight.device).view(1, 1, 4, 1, 1)
    shifted = code.clamp_min(0).view(by_pair).permute(0, 2, 3, 1, 4) << shifts
    words = shifted.sum(2).to(torch.int16).flatten(2).view(torch.uint8)
    panels = torch.cat((words, rest.view(by_pair).permute(0, 2, 3, 1, 4).flatten(2).byte()), 2)
    pairs = torch.where(outside, bits, 0).view(-1, PANEL, inputs // 2, 2).transpose(1, 2)  # [panels, pairs, output, 2]
    panel, pair, output = (pairs != 0).any(-1).nonzero(as_tuple=True)
    found = pairs[panel, pair, output]
    outliers = torch.stack((pair.int() * PANEL + output.int(), found[:, 0] | found[:, 1] << 16), 1)
    first = F.pad(torch.bincount(panel, minlength=len(panels)).cumsum(0), (1, 0)).int()
    parts = [(table << 7).to(torch.int16).repeat(2), panels.flatten(), first, outliers.int().flatten()]
    parts[2] = F.pad(parts[2], (0, -len(first) % (_ALIGNMENT // 4)))
    return torch.cat([part.view(torch.uint8) for part in parts])


def unpacked(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """bfloat16 [outputs, inputs]: the weight itself."""
    num_panels, fours = -(-outputs // PANEL), inputs // INPUTS
    start = 2 * _EXPONENTS * 2
    first_at = start + num_panels * fours * _FOUR_BYTES
    outliers_at = first_at + -(-(num_panels + 1) * 4 // _ALIGNMENT) * _ALIGNMENT
    table = packed[:start].view(torch.int16).int() & 0xFFFF
    panels = packed[start:first_at].view(num_panels, fours, _FOUR_BYTES)
    words = panels[..., :64].contiguous().view(torch.int16).int().view(num_panels, fours, 1, PANEL, 2)
    code = words >> torch.arange(0, 16, 4, device=packed.device).view(1, 1, 4, 1, 1) & 15
    rest = panels[..., 64:].int().view(num_panels, fours, 4, PANEL, 2)
    bits = table[code.long()] | (rest & 0x80) << 8 | rest & 0x7F  # [panels, fours, pair, output, place]
    bits = bits.permute(0, 3, 1, 2, 4).reshape(num_panels, PANEL, inputs // 2, 2)
    outliers = packed[outliers_at:].view(torch.int32).view(-1, 2)
    first = packed[first_at:outliers_at].view(torch.int32)[: num_panels + 1]
    panel = torch.arange(num_panels, device=packed.device).repeat_interleave(first.diff().long())
    place, pair = outliers[:, 0].long(), outliers[:, 1]
    bits[panel, place % PANEL, place // PANEL] |= torch.stack((pair & 0xFFFF, pair >> 16 & 0xFFFF), 1)
    return bits.reshape(-1, inputs)[:outputs].to(torch.int16).view(torch.bfloat16)
