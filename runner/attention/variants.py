"""Paged attention with what some architectures add: a scale of their own, a cap on the scores, a sliding window.

Plain torch over the same pool and batch as paged.py. A window hides keys and frees none of their blocks: the KV of a
request is kept whole, so that prefix hits and hand-overs stay what they are.
"""

from __future__ import annotations

import torch

from runner.attention.asked import Asked
from runner.attention.paged import DecodeGroup, PagedAttention, PrefillRow
from runner.batch import Batch
from runner.device import Device
from runner.kv_pool import KVPool

_MOST_QUERIES = 128


class VariantAttention(PagedAttention):
    """Answers plainly where nothing else is asked. Scores of 128 queries are in memory at a time."""

    def __init__(self, pool: KVPool, device: Device, batch: Batch) -> None:
        super().__init__(pool, device, batch, None)
        self._positions = batch.positions

    def answer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: Asked | None = None,
    ) -> torch.Tensor:
        tokens, heads, head_size = query.shape
        if asked is None or (asked.softcap is None and asked.window is None):
            factor = 1.0 if asked is None else asked.scale * head_size**0.5
            return super().answer(layer, query if abs(factor - 1) < 1e-6 else query * factor, key, value)
        self._store(layer, key, value)
        scaled = query * asked.scale
        out = torch.empty(tokens, heads, head_size, dtype=query.dtype, device=query.device)
        for group in self._decode_groups:
            positions = self._positions[group.start : group.end]
            out[group.start : group.end] = self._variant_decode(
                layer, group, scaled[group.start : group.end], positions, asked
            )
        for row in self._prefill_rows:
            own = slice(row.start, row.end)
            out[own] = self._variant_prefill(layer, row, scaled[own], key[own], value[own], asked)
        return out.view(tokens, heads * head_size)

    def _tiles(self, layer: int, kind: int, tiles: torch.Tensor, *shape: int) -> torch.Tensor:
        return self._pool.gather(layer, kind, tiles).view(*shape)

    def _variant_decode(
        self, layer: int, group: DecodeGroup, query: torch.Tensor, positions: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """query [rows, heads, head_size], positions [rows] → like query."""
        rows, heads, head_size = query.shape
        kv_heads = self._geometry.kv_heads
        keys = self._tiles(layer, 0, group.tiles, rows, kv_heads, -1, head_size)
        values = self._tiles(layer, 1, group.tiles, rows, kv_heads, -1, head_size)
        scores = query.view(rows, kv_heads, -1, head_size) @ keys.transpose(-1, -2)
        visible = _visible(positions[:, None], torch.arange(keys.shape[2], device=keys.device), asked.window)
        return (_weights(scores, visible[:, None, None], asked) @ values).view(rows, heads, head_size)

    def _variant_prefill(
        self, layer: int, row: PrefillRow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """query [tokens, heads, head_size] → the same."""
        tokens, heads, head_size = query.shape
        kv_heads = self._geometry.kv_heads
        if row.tiles is None:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        else:
            keys = self._tiles(layer, 0, row.tiles, kv_heads, -1, head_size)
            values = self._tiles(layer, 1, row.tiles, kv_heads, -1, head_size)
        out = torch.empty_like(query)
        for start in range(0, tokens, _MOST_QUERIES):
            queries = query[start : start + _MOST_QUERIES]
            seen = row.context + start + len(queries)
            positions = torch.arange(seen - len(queries), seen, device=query.device)
            # [kv_heads, heads / kv_heads, queries, seen]
            grouped = queries.view(len(queries), kv_heads, -1, head_size).permute(1, 2, 0, 3)
            scores = grouped @ keys[:, None, :seen].transpose(-1, -2)
            visible = _visible(positions[:, None], torch.arange(seen, device=query.device), asked.window)
            attended = _weights(scores, visible, asked) @ values[:, None, :seen]
            out[start : start + len(queries)] = attended.permute(2, 0, 1, 3).reshape(len(queries), heads, head_size)
        return out


def _visible(positions: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """positions [queries, 1], keys [context] → bool [queries, context]."""
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def _weights(scores: torch.Tensor, visible: torch.Tensor, asked: Asked) -> torch.Tensor:
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    return scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(scores.dtype)
