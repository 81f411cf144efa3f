"""One step as tensors: the rows of a plan packed into one sequence of tokens, and where their keys and values lie.

Packed order: rows of one token (decodes) first, in groups of similar context length, so that a group is padded to
its longest without much waste; then the rows of several tokens (prefills). Everything else then works on slices.

    packed tokens   | decode group 0 | decode group 1 | prefill row | prefill row |
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from runner.device import Device
from runner.requests import PlannedRow

# A further group costs about as much time per step as gathering and multiplying this many padding blocks.
_PADDING_BLOCKS_PER_GROUP = 40

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
    tiles: torch.Tensor | None  # int64 [kv_heads · blocks]; None without context: keys and values are at hand


class Batch(msgspec.Struct, frozen=True):
    token_ids: torch.Tensor  # int64 [tokens]; void where `slot_tokens` points
    slot_tokens: torch.Tensor  # int64 [rows whose last token lies in a slot]: that token in packed order
    slots: torch.Tensor  # int64, same rows
    positions: torch.Tensor  # int64 [tokens]
    written_rows: torch.Tensor  # int64 [tokens · kv_heads]: where the first layer's keys go in `KVPool.rows`
    decode_groups: tuple[DecodeGroup, ...]
    prefill_rows: tuple[PrefillRow, ...]
    sampling_rows: tuple[PlannedRow, ...]  # in planning order
    sampling_tokens: torch.Tensor  # int64 [sampling rows]: each row's last token in packed order
    sampling_slots: torch.Tensor  # int64 [sampling rows]
    fresh_blocks: torch.Tensor | None  # int64: given in this step, and nothing computed lies in them


class BatchBuilder:
    def __init__(self, geometry: Geometry, device: Device) -> None:
        self._geometry, self._device = geometry, device

    def build(self, rows: list[PlannedRow]) -> Batch:
        device, size = self._device, self._geometry.block_size
        groups = self._grouped([row for row in rows if row.num_scheduled == 1])
        prefills = [row for row in rows if row.num_scheduled > 1]
        packed = [row for group in groups for row in group] + prefills
        ends = np.cumsum([row.num_scheduled for row in packed]).tolist()
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
        decode_groups, start = [], 0
        for group in groups:
            decode_groups.append(self._decode_group(group, start))
            start += len(group)
        return Batch(
            token_ids=device.tensor(
                np.concatenate([row.state.token_ids[row.num_computed : row.end] for row in packed]).astype(np.int64)
            ),
            slot_tokens=device.tensor(np.array([last_token[row.index] for row in from_slots], np.int64)),
            slots=device.tensor(np.array([row.state.slot for row in from_slots], np.int64)),
            positions=device.tensor(positions),
            written_rows=device.tensor(self._written_rows(blocks.astype(np.int64), positions % size)),
            decode_groups=tuple(decode_groups),
            prefill_rows=tuple(self._prefill_row(row, last_token[row.index] + 1) for row in prefills),
            sampling_rows=sampling,
            sampling_tokens=device.tensor(np.array([last_token[row.index] for row in sampling], np.int64)),
            sampling_slots=device.tensor(np.array([row.state.slot for row in sampling], np.int64)),
            fresh_blocks=device.tensor(fresh) if len(fresh) else None,
        )

    def _grouped(self, rows: list[PlannedRow]) -> list[list[PlannedRow]]:
        """Shortest context first; a new group where joining the one before would pad it too much."""
        groups: list[list[PlannedRow]] = []
        longest = 0
        for row in sorted(rows, key=lambda row: (row.end, row.index)):
            blocks = self._num_blocks(row)
            if not groups or (blocks - longest) * len(groups[-1]) > _PADDING_BLOCKS_PER_GROUP:
                groups.append([])
            groups[-1].append(row)
            longest = blocks
        return groups

    def _num_blocks(self, row: PlannedRow) -> int:
        return -(-row.end // self._geometry.block_size)

    def _written_rows(self, blocks: Int64, offsets: Int64) -> Int64:
        tiles = self._geometry.tiles(blocks[:, None])[:, :, 0]
        return (tiles * self._geometry.block_size + offsets[:, None]).reshape(-1)

    def _decode_group(self, rows: list[PlannedRow], start: int) -> DecodeGroup:
        geometry, num_blocks = self._geometry, self._num_blocks(rows[-1])
        tables = np.zeros((len(rows), num_blocks), np.int64)
        for table, row in zip(tables, rows, strict=True):
            own = self._num_blocks(row)
            table[:own] = row.state.block_table[:own]
        visible = np.arange(num_blocks * geometry.block_size) < np.array([row.end for row in rows])[:, None]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        shape = (len(rows), geometry.kv_heads, geometry.heads // geometry.kv_heads, mask.shape[1])
        on_device = self._device.tensor(mask).to(self._device.dtype)
        return DecodeGroup(
            start,
            start + len(rows),
            self._device.tensor(geometry.tiles(tables).reshape(-1)),
            on_device[:, None, None].expand(shape).reshape(-1, *shape[2:]),
        )

    def _prefill_row(self, row: PlannedRow, end: int) -> PrefillRow:
        tiles = None
        if row.num_computed:
            table = row.state.block_table[: self._num_blocks(row)].astype(np.int64)
            tiles = self._device.tensor(self._geometry.tiles(table).reshape(-1))
        return PrefillRow(end - row.num_scheduled, end, row.num_computed, tiles)

    def _fresh(self, row: PlannedRow) -> npt.NDArray[np.int32]:
        """The row's new blocks behind everything that is computed, here or by whoever sent the blocks."""
        used = -(-row.num_computed // self._geometry.block_size)
        already = len(row.state.block_table) - len(row.new_block_ids)
        return row.new_block_ids[max(0, used - already) :]
