"""Keys and values as int8: one bfloat16 scale for each vector of a token, KV head and kind, symmetric about zero.

    x ≈ scale · q,   scale = bfloat16(max |x| / 127),   q = round(x / scale), ties to even, in [-127, 127]

The scale is rounded before q is made with it, so its own rounding costs nothing; bfloat16 has float32's range. A vector
of zeros has scale 0. One with an infinity or a NaN has a scale that is none either, so that it stays visible.
"""

from __future__ import annotations

import torch

LARGEST = 127
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[…, head_size] → int8 […, head_size] and scales bfloat16 […]."""
    wide = states.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = scales.masked_fill(scales < _SMALLEST_NORMAL, 0).bfloat16()
    step = scales.float()[..., None]
    inverse = torch.where((step > 0) & step.isfinite(), 1 / step, 0.0)
    return (wide * inverse).round().nan_to_num_(0.0).to(torch.int8), scales


def dequantise(quantised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The other way, rounded to `dtype`."""
    return (quantised.float() * scales.float()[..., None]).to(dtype)
