"""One step as tensors: the rows of a plan packed into one sequence of tokens, and where their keys and values lie.

Packed order: rows of one token (decodes) first, the shortest context first, so that neighbours can be padded to one
length without much waste; then the rows of several tokens (prefills). Everything else then works on slices.

    packed tokens   | decodes | prefill row | prefill row |
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from runner.device import Device
from runner.requests import PlannedRow

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Geometry(msgspec.Struct, frozen=True):
    """Of the KV pool: where block b's tile of head h begins, counted in tiles and in rows; see kv_pool.py."""

    heads: int
    kv_heads: int
    layers: int
    block_size: int

    def tiles(self, block_ids: Int64) -> Int64:
        """First layer's key tile of each head: block_ids [..., n] → [..., kv_heads, n]."""
        heads = np.arange(self.kv_heads)[:, None]
        return (block_ids[..., None, :] * self.kv_heads + heads) * (2 * self.layers)


class Rows(msgspec.Struct, frozen=True):
    """The batch's rows in packed order, on the host: rows of one token first, the shortest context first."""

    starts: Int32  # [rows + 1]: each row's first token in packed order, and the number of tokens
    contexts: Int32  # [rows]: tokens of the request that lie in the pool before this step
    block_tables: Int32  # [rows, most blocks]: the blocks up to the row's last token; behind them the null block

    def columns(self) -> tuple[Int32, Int32, Int32]:
        """As the operator `paged_attention` takes them."""
        return self.block_tables, self.starts, self.contexts


class Batch(msgspec.Struct, frozen=True):
    token_ids: torch.Tensor  # int64 [tokens]; void where `slot_tokens` points
    slot_tokens: torch.Tensor  # int64 [rows whose last token lies in a slot]: that token in packed order
    slots: torch.Tensor  # int64, same rows
    positions: torch.Tensor  # int64 [tokens]
    stored: torch.Tensor  # int64 [tokens · kv_heads]: where the first layer's keys go in `KVPool.rows`
    geometry: Geometry
    rows: Rows
    sampling_rows: tuple[PlannedRow, ...]  # in planning order
    sampling_tokens: torch.Tensor  # int64 [sampling rows]: each row's last token in packed order
    sampling_slots: torch.Tensor  # int64 [sampling rows]
    fresh_blocks: torch.Tensor | None  # int64: given in this step, and nothing computed lies in them


class BatchBuilder:
    def __init__(self, geometry: Geometry, device: Device) -> None:
        self._geometry, self._device = geometry, device

    def build(self, rows: list[PlannedRow]) -> Batch:
        device, size = self._device, self._geometry.block_size
        decodes = sorted((row for row in rows if row.num_scheduled == 1), key=lambda row: (row.end, row.index))
        packed = decodes + [row for row in rows if row.num_scheduled > 1]
        starts = np.cumsum([0] + [row.num_scheduled for row in packed])
        ends = starts[1:].tolist()
        last_token = {row.index: end - 1 for row, end in zip(packed, ends, strict=True)}
        positions = np.concatenate([np.arange(row.num_computed, row.end) for row in packed])
        blocks = np.concatenate(
            [
                row.state.block_table[positions[end - row.num_scheduled : end] // size]
                for row, end in zip(packed, ends, strict=True)
            ]
        )
        sampling = tuple(row for row in rows if row.num_sampled)
        from_slots = [row for row in packed if row.from_slot]
        fresh = np.concatenate([self._fresh(row) for row in rows]).astype(np.int64)
        return Batch(
            token_ids=device.tensor(
                np.concatenate([row.state.token_ids[row.num_computed : row.end] for row in packed]).astype(np.int64)
            ),
            slot_tokens=device.tensor(np.array([last_token[row.index] for row in from_slots], np.int64)),
            slots=device.tensor(np.array([row.state.slot for row in from_slots], np.int64)),
            positions=device.tensor(positions),
            stored=device.tensor(self._stored(blocks.astype(np.int64), positions % size)),
            geometry=self._geometry,
            rows=Rows(
                starts.astype(np.int32),
                np.array([row.num_computed for row in packed], np.int32),
                self._block_tables(packed),
            ),
            sampling_rows=sampling,
            sampling_tokens=device.tensor(np.array([last_token[row.index] for row in sampling], np.int64)),
            sampling_slots=device.tensor(np.array([row.state.slot for row in sampling], np.int64)),
            fresh_blocks=device.tensor(fresh) if len(fresh) else None,
        )

    def _block_tables(self, rows: list[PlannedRow]) -> Int32:
        num_blocks = [-(-row.end // self._geometry.block_size) for row in rows]
        tables = np.zeros((len(rows), max(num_blocks)), np.int32)
        for table, row, own in zip(tables, rows, num_blocks, strict=True):
            table[:own] = row.state.block_table[:own]
        return tables

    def _stored(self, blocks: Int64, offsets: Int64) -> Int64:
        tiles = self._geometry.tiles(blocks[:, None])[:, :, 0]
        return (tiles * self._geometry.block_size + offsets[:, None]).reshape(-1)

    def _fresh(self, row: PlannedRow) -> npt.NDArray[np.int32]:
        """The row's new blocks behind everything that is computed, here or by whoever sent the blocks."""
        used = -(-row.num_computed // self._geometry.block_size)
        already = len(row.state.block_table) - len(row.new_block_ids)
        return row.new_block_ids[max(0, used - already) :]
