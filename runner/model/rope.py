"""Rotary position embedding: the table of angles, with the scalings kvyard knows. The kernels do the rotation.

Halves lie apart, as in HF models: dimension i turns with dimension i + head_size / 2, by an angle of
position · theta^(-2i / head_size).
"""

from __future__ import annotations

import json
import math

import torch

from actors.messages.errors import ConfigurationError


def inverse_frequencies(head_size: int, theta: float, scaling: str) -> torch.Tensor:
    """float32 [head_size / 2]. `scaling` as in ModelDescription. llama3: formula of Llama 3.1's model card and HF."""
    frequencies: torch.Tensor = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if not scaling:
        return frequencies
    values = json.loads(scaling)
    match values["rope_type"]:
        case "linear":
            return frequencies / float(values["factor"])
        case "factors":
            return frequencies / torch.tensor(values["factors"], dtype=torch.float32)
        case "llama3":
            return _llama3(frequencies, values)
        case kind:
            raise ConfigurationError(f"rope scaling {kind!r} is unknown; kvyard knows linear, llama3 and factors")


def _llama3(frequencies: torch.Tensor, values: dict[str, float]) -> torch.Tensor:
    """Slow rotations are divided by `factor`, quick ones stay, those between are blended."""
    original = values["original_max_position_embeddings"]
    low, high, factor = values["low_freq_factor"], values["high_freq_factor"], values["factor"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)


def angle_table(head_size: int, theta: float, scaling: str, max_positions: int) -> torch.Tensor:
    """float32 [max_positions, head_size]: head_size / 2 cosines of a position's angles, then their sines."""
    angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(head_size, theta, scaling)
    return torch.cat((angles.cos(), angles.sin()), -1)
