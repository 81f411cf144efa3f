"""Rotary position embedding: the table of angles, with the scalings kvyard knows, and the rotation.

Halves lie apart, as in HF models: dimension i turns with dimension i + head_size / 2, by an angle of
position · theta^(-2i / head_size).
"""

from __future__ import annotations

import json
import math

import torch

from actors.messages.errors import ConfigurationError


def inverse_frequencies(head_size: int, theta: float, scaling: str) -> torch.Tensor:
    """float32 [head_size / 2]. `scaling` as in ModelDescription. llama3: formula of Llama 3.1's model card and HF;
    yarn: section 3.2 of arXiv:2309.00071, with the details of HF's modeling_rope_utils."""
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
        case "yarn":
            return _yarn(frequencies, head_size, theta, values)
        case kind:
            raise ConfigurationError(f"rope scaling {kind!r} is unknown; kvyard knows linear, llama3, yarn and factors")


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


def _yarn(frequencies: torch.Tensor, head_size: int, theta: float, values: dict[str, float]) -> torch.Tensor:
    """A ramp over the dimensions: quick rotations stay, slow ones are divided by `factor`."""

    def dimension(rotations: float) -> float:
        """The one that turns so often within the original context."""
        original = values["original_max_position_embeddings"]
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(values["beta_fast"]), dimension(values["beta_slow"])
    if values["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    high += 0.001 if low == high else 0
    slow = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / values["factor"] * slow + frequencies * (1 - slow)


def magnitude(scaling: str) -> float:
    """What cos and sin are multiplied by: yarn's `attention_factor`, 1 for every other scaling."""
    return float(json.loads(scaling).get("attention_factor", 1.0)) if scaling else 1.0


class RotaryEmbedding:
    def __init__(
        self, head_size: int, theta: float, scaling: str, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(head_size, theta, scaling)
        self._half = head_size // 2
        scale = magnitude(scaling)
        self._cos = (torch.cat((angles.cos(), angles.cos()), -1) * scale).to(device, dtype)
        self._sin = (angles.sin() * scale).to(device, dtype)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos [tokens, 1, head_size], sin [tokens, 1, head_size / 2]) of positions [tokens]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """heads [tokens, heads, head_size] → the same, turned."""
        cos, sin = angles
        half = self._half
        turned = heads * cos
        turned[..., :half].addcmul_(heads[..., half:], sin, value=-1)
        turned[..., half:].addcmul_(heads[..., :half], sin)
        return turned
