"""Memory in large pages for what every step reads from one end to the other: a tenth off the weight products.

Invariant: a tensor given out is nobody else's, and its memory lives as long as any tensor of its slab.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_SLAB_BYTES, _ALIGNMENT = 1 << 26, 64


class LargePages:
    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, contiguous, in large pages where the system gives them."""
        num_bytes = math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._slab):
            self._slab = _mapped(max(num_bytes, _SLAB_BYTES))
        own, self._slab = self._slab[: tensor.nbytes], self._slab[num_bytes:]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _mapped(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
