"""Attention over the paged KV pool for one packed batch of decodes and prefills.

Query heads that share a KV head are rows of one matrix product with it, so keys and values are never repeated.
Decodes: one gather of whole tiles and one batched product for each group. Prefills: request by request, in chunks of
queries that keep the scores in the cache and skip most of what causality hides.
"""

from __future__ import annotations

import torch

from runner.batch import Batch, DecodeGroup, Geometry, PrefillRow
from runner.kv_pool import KVPool

# Queries · heads · context of one chunk of a prefill, and its most queries: scores of 1 MiB in bfloat16.
_CHUNK_SCORES, _MOST_QUERIES, _FEWEST_QUERIES = 1 << 19, 128, 16


class PagedAttention:
    """The `Attention` of model/llama.py for one batch."""

    def __init__(self, pool: KVPool, geometry: Geometry, batch: Batch) -> None:
        self._pool, self._geometry, self._batch = pool, geometry, batch
        self._group_size = geometry.heads // geometry.kv_heads
        dtype, device = pool.tensor.dtype, pool.tensor.device
        # Right-aligned: its last c · group_size rows hide, of the last c tokens, those behind each query.
        hidden = torch.ones(_MOST_QUERIES, _MOST_QUERIES, dtype=torch.bool, device=device).triu(1)
        future = torch.zeros(_MOST_QUERIES, _MOST_QUERIES, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)
        self._future = future.repeat_interleave(self._group_size, 0) if batch.prefill_rows else future

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens, heads, head_size = query.shape
        size = self._geometry.block_size
        for kind, states in enumerate((key, value)):
            rows = self._pool.rows[(2 * layer + kind) * size :]
            rows.index_copy_(0, self._batch.written_rows, states.reshape(-1, head_size))
        scaled = query * head_size**-0.5
        out = torch.empty(tokens, heads * head_size, dtype=query.dtype, device=query.device)
        for group in self._batch.decode_groups:
            out[group.start : group.end] = self._decode(layer, group, scaled[group.start : group.end])
        for row in self._batch.prefill_rows:
            own = slice(row.start, row.end)
            out[own] = self._prefill(layer, row, scaled[own], key[own], value[own])
        return out

    def _gather(self, layer: int, kind: int, tiles: torch.Tensor, sequences: int, head_size: int) -> torch.Tensor:
        """[sequences, context, head_size] of keys (0) or values (1)."""
        return self._pool.tiles[2 * layer + kind :].index_select(0, tiles).view(sequences, -1, head_size)

    def _decode(self, layer: int, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        rows, heads, head_size = query.shape
        sequences = rows * self._geometry.kv_heads
        keys = self._gather(layer, 0, group.tiles, sequences, head_size)
        grouped = query.reshape(sequences, self._group_size, head_size)
        scores = torch.baddbmm(group.mask, grouped, keys.transpose(1, 2))
        values = self._gather(layer, 1, group.tiles, sequences, head_size)
        return torch.bmm(scores.softmax(-1), values).view(rows, heads * head_size)

    def _prefill(
        self, layer: int, row: PrefillRow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        tokens, heads, head_size = query.shape
        kv_heads, group_size = self._geometry.kv_heads, self._group_size
        if row.tiles is None:
            keys, values = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
        else:
            keys = self._gather(layer, 0, row.tiles, kv_heads, head_size)
            values = self._gather(layer, 1, row.tiles, kv_heads, head_size)
        # [kv_heads, tokens · group_size, head_size]
        grouped = query.view(tokens, kv_heads, -1).transpose(0, 1).reshape(kv_heads, tokens * group_size, head_size)
        out = torch.empty_like(grouped)
        chunk = _CHUNK_SCORES // (heads * (row.context + tokens))
        chunk = max(_FEWEST_QUERIES, min(_MOST_QUERIES, chunk))
        for start in range(0, tokens, chunk):
            queries = min(chunk, tokens - start)
            seen = row.context + start + queries
            own = slice(start * group_size, (start + queries) * group_size)
            scores = torch.bmm(grouped[:, own], keys[:, :seen].transpose(1, 2))
            scores[:, :, seen - queries :] += self._future[-queries * group_size :, -queries:]
            torch.bmm(scores.softmax(-1), values[:, :seen], out=out[:, own])
        return out.view(kv_heads, tokens, -1).transpose(0, 1).reshape(tokens, heads * head_size)
