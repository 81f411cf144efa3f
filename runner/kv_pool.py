"""The KV pool: one page-aligned span of memory that holds every block of a model's keys and values.

Shape [num_blocks, kv_heads, layers, 2, block_size, head_size], 2 = key, value. Block 0 is the null block: rows that are
only padding point at it. Invariant: every value is finite; `clear` is called on blocks before their first use, since
a masked position still multiplies what lies there by zero.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from actors.messages.errors import ConfigurationError
from runner.device import Device


class KVPool:
    def __init__(
        self, device: Device, *, num_blocks: int, kv_heads: int, layers: int, block_size: int, head_size: int
    ) -> None:
        """Zeros; a CPU takes the memory as blocks are first used. Raises ConfigurationError when it is too much."""
        shape = (num_blocks, kv_heads, layers, 2, block_size, head_size)
        self.num_bytes = math.prod(shape) * device.dtype.itemsize
        self.block_bytes = self.num_bytes // num_blocks
        self._memory: mmap.mmap | None = None
        try:
            if device.is_cpu:
                self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                # Tiles of 2 KiB lie far apart; with 4 KiB pages reading them misses the TLB. Shared memory, the default
                # of mmap, would not get the large ones.
                with contextlib.suppress(OSError, AttributeError):
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
                # What people wrote is nothing for a core dump, which 1 GiB would only make slow.
                with contextlib.suppress(OSError, AttributeError):
                    self._memory.madvise(mmap.MADV_DONTDUMP)
                self.tensor = torch.frombuffer(self._memory, dtype=device.dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=device.dtype, device=device.torch)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"a KV pool of {self.num_bytes / 2**30:.2f} GiB does not fit: {error}. Give a smaller --kv-memory"
            ) from error
        # One row per (block, head, layer, key or value): block_size · head_size values, contiguous.
        self.tiles = self.tensor.view(-1, block_size * head_size)
        # One row per token of each of these.
        self.rows = self.tensor.view(-1, head_size)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def memory(self) -> memoryview:
        """The pool's bytes, writable. On a CPU only."""
        if self._memory is None:
            raise TypeError("the KV pool does not lie in host memory")
        return memoryview(self._memory)

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes blocks; ids int64 [n]."""
        self.tensor.index_fill_(0, block_ids, 0)
