"""The KV pool as the transports see it: one span of bytes, divided into blocks of equal size.

Owns nothing: the runner allocates the pool, and hands its address over together with an object that keeps it alive.
Block i lies at `address + i * block_bytes`, all layers of it; so one block is one descriptor, and neighbours merge.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]


def block_ids_of(column: bytes) -> BlockIds:
    """The int32 little-endian column of a message as an array."""
    return np.frombuffer(column, dtype="<i4").astype(np.int32, copy=False)


class KVMemory:
    """`num_blocks` blocks of `block_bytes` bytes from `address` on, in this process's memory (CPU)."""

    def __init__(self, address: int, num_blocks: int, block_bytes: int, keep_alive: object = None) -> None:
        self.address, self.num_blocks, self.block_bytes = address, num_blocks, block_bytes
        self.num_bytes = num_blocks * block_bytes
        self._keep_alive = keep_alive
        self.view = memoryview((ctypes.c_uint8 * self.num_bytes).from_address(address)).cast("B")

    @classmethod
    def of_array(cls, array: npt.NDArray[np.uint8], block_bytes: int) -> KVMemory:
        """Over a C-contiguous array of bytes whose size is a multiple of `block_bytes`."""
        if not array.flags.c_contiguous or array.nbytes % block_bytes:
            raise ValueError(f"a pool is contiguous and a multiple of {block_bytes} bytes, not {array.nbytes}")
        return cls(array.ctypes.data, array.nbytes // block_bytes, block_bytes, array)

    @classmethod
    def nothing(cls, block_bytes: int) -> KVMemory:
        """No blocks: of a pool that does not lie in host memory nothing is lent, and nothing lands there."""
        return cls.of_array(np.empty(0, np.uint8), block_bytes)

    def block(self, block_id: int) -> memoryview:
        return self.view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def span(self, first_block: int, num_blocks: int) -> memoryview:
        return self.view[first_block * self.block_bytes : (first_block + num_blocks) * self.block_bytes]

    def holds(self, block_ids: BlockIds) -> bool:
        """Whether every id names a block of this pool."""
        return not block_ids.size or bool(block_ids.min() >= 0 and block_ids.max() < self.num_blocks)


def runs(*columns: BlockIds) -> list[tuple[int, int]]:
    """Where all columns count up by one together: (position, length) of each such run, in order."""
    size = columns[0].size
    if not size:
        return []
    breaks = np.zeros(size - 1, dtype=bool)
    for column in columns:
        breaks |= np.diff(column) != 1
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1, [size]))
    return [(int(a), int(b - a)) for a, b in pairwise(starts)]
