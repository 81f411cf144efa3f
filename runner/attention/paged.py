"""Attention over the paged KV pool for one packed batch of decodes and prefills, in plain torch on any device.

Query heads that share a KV head are rows of one matrix product with it, so keys and values are never repeated.
Decodes: groups of similar context length, one gather of whole tiles and one batched product for each; a group is padded
to its longest. Prefills: request by request, in chunks of queries that keep the scores in the cache and skip most of
what causality hides.

    packed tokens   | decode group 0 | decode group 1 | prefill row | prefill row |
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import torch

from runner.batch import Batch, Int32
from runner.device import Device
from runner.kernels import reference
from runner.kv_pool import KVPool

# Queries · heads · context of one chunk of a prefill, and its most queries: scores of 1 MiB in bfloat16.
_CHUNK_SCORES, _MOST_QUERIES, _FEWEST_QUERIES = 1 << 19, 128, 16
# A further group costs about as much time per step as gathering and multiplying this many padding blocks.
_PADDING_BLOCKS_PER_GROUP = 40


class DecodeGroup(msgspec.Struct, frozen=True):
    """Rows [start, end) with one query each. S = padded context, a multiple of the block size."""

    start: int
    end: int
    tiles: torch.Tensor  # int64 [rows · kv_heads · S / block_size]
    mask: torch.Tensor  # [rows · kv_heads, heads / kv_heads, S]: 0, or -inf for padding


class PrefillRow(msgspec.Struct, frozen=True):
    """Tokens [start, end) of one request, behind `context` tokens that lie in the pool already."""

    start: int
    end: int
    context: int
    tiles: torch.Tensor | None  # int64 [kv_heads · blocks]; None: keys and values at hand are all, and as stored


class PagedAttention:
    """The `Attention` of kernels/kernels.py for one batch."""

    def __init__(self, pool: KVPool, device: Device, batch: Batch, angles: torch.Tensor | None) -> None:
        """`angles` None: queries and keys come turned, through `answer`."""
        if batch.fresh_blocks is not None:
            pool.clear(batch.fresh_blocks)  # what is masked is multiplied by zero: it must be finite
        self._pool, self._device, self._geometry = pool, device, batch.geometry
        self._stored = batch.stored
        self._angles = None if angles is None else angles[batch.positions]
        self._group_size = self._geometry.heads // self._geometry.kv_heads
        self._decode_groups, self._prefill_rows = self._groups(batch), self._prefills(batch)
        dtype = device.dtype
        # Right-aligned: its last c · group_size rows hide, of the last c tokens, those behind each query.
        hidden = torch.ones(_MOST_QUERIES, _MOST_QUERIES, dtype=torch.bool, device=device.torch).triu(1)
        future = torch.zeros(_MOST_QUERIES, _MOST_QUERIES, dtype=dtype, device=device.torch)
        future.masked_fill_(hidden, -torch.inf)
        self._future = future.repeat_interleave(self._group_size, 0) if self._prefill_rows else future

    def _groups(self, batch: Batch) -> list[DecodeGroup]:
        """A new group where joining the one before would pad it too much."""
        size, rows = self._geometry.block_size, batch.rows
        num_decodes = int((np.diff(rows.starts) == 1).sum())
        num_blocks = (rows.contexts[:num_decodes] // size + 1).tolist()
        bounds, longest = [0], 0
        for row, blocks in enumerate(num_blocks):
            if row and (blocks - longest) * (row - bounds[-1]) > _PADDING_BLOCKS_PER_GROUP:
                bounds.append(row)
            longest = blocks
        bounds.append(num_decodes)
        return [
            self._decode_group(
                start, end, rows.block_tables[start:end, : num_blocks[end - 1]], rows.contexts[start:end]
            )
            for start, end in pairwise(bounds)
            if start < end
        ]

    def _decode_group(self, start: int, end: int, tables: Int32, contexts: Int32) -> DecodeGroup:
        geometry = self._geometry
        visible = np.arange(tables.shape[1] * geometry.block_size) <= contexts[:, None]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        shape = (end - start, geometry.kv_heads, self._group_size, mask.shape[1])
        on_device = self._device.tensor(mask).to(self._device.dtype)
        return DecodeGroup(
            start,
            end,
            self._device.tensor(geometry.tiles(tables.astype(np.int64)).reshape(-1)),
            on_device[:, None, None].expand(shape).reshape(-1, *shape[2:]),
        )

    def _prefills(self, batch: Batch) -> list[PrefillRow]:
        rows, found = batch.rows, list[PrefillRow]()
        spans = zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), rows.contexts.tolist(), strict=True)
        for (start, end, context), table in zip(spans, rows.block_tables, strict=True):
            if end - start > 1:
                own = table[: -(-(context + end - start) // self._geometry.block_size)].astype(np.int64)
                # What was rounded to int8 is read as it will be read by later steps, whatever the chunks.
                gathered = context or self._pool.scales is not None
                tiles = self._device.tensor(self._geometry.tiles(own).reshape(-1)) if gathered else None
                found.append(PrefillRow(start, end, context, tiles))
        return found

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        head_size = self._pool.tensor.shape[-1]
        heads, kv_heads = self._geometry.heads, self._geometry.kv_heads
        states = qkv.view(len(qkv), -1, head_size)
        assert self._angles is not None
        reference.rotate(states[:, : heads + kv_heads], self._angles)
        return self.answer(layer, states[:, :heads], states[:, heads:-kv_heads], states[:, -kv_heads:])

    def answer(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size] → [tokens, heads · head_size].

        Key and value of every token are stored first.
        """
        tokens, heads, head_size = query.shape
        self._store(layer, key, value)
        scaled = query * head_size**-0.5
        out = torch.empty(tokens, heads * head_size, dtype=query.dtype, device=query.device)
        for group in self._decode_groups:
            out[group.start : group.end] = self._decode(layer, group, scaled[group.start : group.end])
        for row in self._prefill_rows:
            own = slice(row.start, row.end)
            out[own] = self._prefill(layer, row, scaled[own], key[own], value[own])
        return out

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for kind, states in enumerate((key, value)):
            reference.store(kind, states, self._pool.tensor, self._stored, layer, self._pool.scales)

    def _gather(self, layer: int, kind: int, tiles: torch.Tensor, sequences: int, head_size: int) -> torch.Tensor:
        """[sequences, context, head_size] of keys (0) or values (1)."""
        return self._pool.gather(layer, kind, tiles).view(sequences, -1, head_size)

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
