"""The KV pool: one page-aligned span of memory that holds every block of a model's keys and values.

Shape [num_blocks, kv_heads, layers, 2, block_size, head_size], 2 = key, value. Block 0 is the null block: rows that are
only padding point at it. What a block holds behind a request's last token is anybody's: attention that multiplies it by
a masked position's zero must `clear` blocks before their first use; attention that leaves it alone need not.

With `kv_dtype` "int8" the scales of kv_quantisation.py lie behind each head's share of a block, so that a block and a
head's part of it stay contiguous, and the int8 of a tile begin and end with a cache line:

    block | head 0: int8 [layers, 2, block_size, head_size], bfloat16 [layers, 2, block_size] | head 1: … |
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from actors.messages.errors import ConfigurationError
from runner.device import Device
from runner.kv_quantisation import dequantise

_SCALE_BYTES = 2


class KVPool:
    def __init__(
        self,
        device: Device,
        *,
        num_blocks: int,
        kv_heads: int,
        layers: int,
        block_size: int,
        head_size: int,
        kv_dtype: str = "auto",
    ) -> None:
        """Zeros; a CPU takes the memory as blocks are first used. Raises ConfigurationError when it is too much.

        `kv_dtype`: "auto" for the device's dtype, or "int8".
        """
        if kv_dtype not in ("auto", "int8"):
            raise ConfigurationError(f"KV dtype {kv_dtype!r} is unknown; kvyard knows auto and int8")
        quantised = kv_dtype == "int8"
        self.dtype = device.dtype  # of what is put in and taken out
        shape = (num_blocks, kv_heads, layers, 2, block_size, head_size)
        values = math.prod(shape[2:])  # of one head's share of a block
        head_bytes = values + math.prod(shape[2:5]) * _SCALE_BYTES if quantised else values * device.dtype.itemsize
        self.block_bytes = kv_heads * head_bytes
        self.num_bytes = num_blocks * self.block_bytes
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
                self._bytes = torch.frombuffer(self._memory, dtype=torch.int8)
            else:
                self._bytes = torch.zeros(self.num_bytes, dtype=torch.int8, device=device.torch)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"a KV pool of {self.num_bytes / 2**30:.2f} GiB does not fit: {error}. Give a smaller --kv-memory"
            ) from error
        self._bytes = self._bytes.view(num_blocks, self.block_bytes)
        self.scales: torch.Tensor | None = None  # bfloat16 [num_blocks, kv_heads, layers, 2, block_size]
        if quantised:
            heads = self._bytes.view(num_blocks, kv_heads, head_bytes)
            self.tensor = torch.unflatten(heads[:, :, :values], 2, shape[2:])
            self.scales = torch.unflatten(heads[:, :, values:].view(torch.bfloat16), 2, shape[2:5])
        else:
            self.tensor = self._bytes.view(device.dtype).view(shape)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    @property
    def is_in_host_memory(self) -> bool:
        return self._memory is not None

    def memory(self) -> memoryview:
        """The pool's bytes, writable. Raises TypeError when they are not in host memory."""
        if self._memory is None:
            raise TypeError("the KV pool does not lie in host memory")
        return memoryview(self._memory)

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes blocks; ids int64 [n]. Each takes about as long as a token: it is keys and values of all layers."""
        self._bytes.index_fill_(0, block_ids, 0)

    def clear_null_block(self) -> None:
        self._bytes[0].zero_()

    def gather(self, layer: int, kind: int, tiles: torch.Tensor) -> torch.Tensor:
        """[n, block_size, head_size] of keys (0) or values (1), in `dtype`. tiles int64 [n], see `Geometry.tiles`."""
        if self.scales is None:
            block_size, head_size = self.tensor.shape[-2:]
            flat = self.tensor.view(-1, block_size * head_size)[2 * layer + kind :]
            return flat.index_select(0, tiles).view(-1, block_size, head_size)
        heads = tiles // (2 * self.tensor.shape[2])
        found = self.tensor.flatten(0, 1)[:, layer, kind].index_select(0, heads)
        return dequantise(found, self.scales.flatten(0, 1)[:, layer, kind].index_select(0, heads), self.dtype)
