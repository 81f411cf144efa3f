"""Draws the next tokens. A draw depends on the row's logits, its sampling parameters, its seed and its output position
only: neither on the batch around it nor on what the request went through before.

Drawing is the exponential race (Gumbel-max): the token with the largest logit / temperature - log E wins, E being an
exponential variate made from a hash of (seed, output position, token id). So rounding in the logits changes a draw
only where two tokens are as good as equal, not wherever a cumulative sum meets a threshold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from actors.messages.request import SamplingParams
from runner.device import Device

# Below this a temperature means greedy: logits / temperature would leave float32.
_LEAST_TEMPERATURE = 1e-5
# So many of the likeliest tokens are looked at before the whole vocabulary is sorted for top-p.
_NUCLEUS_GUESS = 1024


class Draw(msgspec.Struct, frozen=True):
    """What a row of logits is drawn with. `seed` is any text or number that belongs to the request alone."""

    sampling: SamplingParams
    seed: int | str
    output_position: int

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _LEAST_TEMPERATURE

    @property
    def filtered(self) -> bool:
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0

    def keys(self) -> tuple[int, int]:
        """Two int32 of the hash of seed and position."""
        digest = hashlib.blake2b(f"{self.seed}:{self.output_position}".encode(), digest_size=8).digest()
        first, second = np.frombuffer(digest, "<i4").tolist()
        return first, second


def sample(logits: torch.Tensor, draws: Sequence[Draw], device: Device) -> torch.Tensor:
    """logits float32 [rows, vocabulary], one draw each → int64 [rows]. Among equal winners the lowest id."""
    # torch.max promises the first of equals, argmax does not.
    chosen = logits.max(dim=-1).indices
    plain = [row for row, draw in enumerate(draws) if not draw.greedy and not draw.filtered]
    filtered = [row for row, draw in enumerate(draws) if not draw.greedy and draw.filtered]
    if plain:
        rows = device.tensor(np.array(plain))
        own = [draws[row] for row in plain]
        scaled = logits[rows] / _column([draw.sampling.temperature for draw in own], device)
        token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        chosen[rows] = (scaled + _gumbel(token_ids.expand(len(own), -1), own, device)).max(dim=-1).indices
    if filtered:
        rows = device.tensor(np.array(filtered))
        # To see whether the first look was enough is to wait for the device; where that costs, all tokens are ranked.
        looked_at = logits.shape[1] if device.is_asynchronous else _NUCLEUS_GUESS
        chosen[rows] = _sample_filtered(logits[rows], [draws[row] for row in filtered], device, looked_at)
    return chosen


def _sample_filtered(logits: torch.Tensor, draws: Sequence[Draw], device: Device, looked_at: int) -> torch.Tensor:
    """Top-k, then top-p of what remains. Without top-k only the `looked_at` likeliest tokens are ranked at first."""
    vocabulary = logits.shape[1]
    scaled = logits / _column([draw.sampling.temperature for draw in draws], device)
    top_k = [min(draw.sampling.top_k, vocabulary) if draw.sampling.top_k > 0 else vocabulary for draw in draws]
    width = min(vocabulary, max(k if k < vocabulary else looked_at for k in top_k))
    values, token_ids = _ranked(scaled, width)
    within_k = torch.arange(width, device=logits.device) < device.tensor(np.array(top_k))[:, None]
    # Of tokens outside top-k nothing counts; without top-k all of the vocabulary does, looked at or not.
    by_rank = values.masked_fill(~within_k, -torch.inf)
    unlimited = device.tensor(np.array([k == vocabulary for k in top_k]))
    total = torch.where(unlimited, scaled.logsumexp(-1), by_rank.logsumexp(-1))
    probabilities = (by_rank - total[:, None]).exp()
    reached = probabilities.cumsum(-1)
    top_p = _column([draw.sampling.top_p for draw in draws], device)
    # With top_p 1 rounding must not cut the tail; the likeliest token always stays.
    nucleus = (reached - probabilities < top_p) | (top_p >= 1.0)
    nucleus[:, 0] = True
    kept = by_rank.masked_fill(~nucleus, -torch.inf)
    winners = (kept + _gumbel(token_ids.to(torch.int32), draws, device)).max(dim=-1, keepdim=True).indices
    chosen = token_ids.gather(1, winners)[:, 0]
    if width < vocabulary:
        open_ended = (reached[:, -1] < top_p[:, 0]) & unlimited
        short = [row for row, too_few in enumerate(open_ended.tolist()) if too_few]
        if short:
            rows = device.tensor(np.array(short))
            chosen[rows] = _sample_filtered(logits[rows], [draws[row] for row in short], device, vocabulary)
    return chosen


def _ranked(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of float32 [rows, n], falling, and their int64 indices; equals by rising index.

    Equal logits are common in bfloat16 and `topk` takes any of them, so what is ranked are integers without equals:
    the float's bits in an order that integers share, then the index from the end.
    """
    last = scores.shape[1] - 1
    bits = scores.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=scores.device)
    largest = keys.topk(width, dim=-1).values if width <= last else keys.sort(dim=-1, descending=True).values
    indices = last - (largest & 0xFFFFFFFF)
    return scores.gather(1, indices), indices


def _column(values: Sequence[float], device: Device) -> torch.Tensor:
    return device.tensor(np.array(values, np.float32))[:, None]


def _gumbel(token_ids: torch.Tensor, draws: Sequence[Draw], device: Device) -> torch.Tensor:
    return gumbel(token_ids, device.tensor(keys_of(draws)))


def keys_of(draws: Sequence[Draw]) -> npt.NDArray[np.int32]:
    """[rows, 2]"""
    return np.array([draw.keys() for draw in draws], np.int64).astype(np.int32)


def gumbel(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 of token_ids' shape [rows, n]: -log E, E = -log(1 - u); u from a hash of (keys [rows, 2], token id).

    The hash is murmur3's finaliser with the second key added in the middle; its lower 31 bits make u, fine near 0,
    where the winners are.
    """
    x = token_ids ^ keys[:, :1]
    x ^= _shifted(x, 16)
    x *= -2048144789  # 0x85EBCA6B as int32
    x += keys[:, 1:]
    x ^= _shifted(x, 13)
    x *= -1028477387  # 0xC2B2AE35 as int32
    x ^= _shifted(x, 16)
    uniform = (x & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
