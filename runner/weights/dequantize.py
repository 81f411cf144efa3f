"""The weights of a GGUF tensor as numbers, piece by piece, so that what lies between is small and stays in the cache.

Owns fast ways for the formats of most files; `gguf` itself has one for every format and is the reference. Invariant:
each weight is the float32 that `gguf.quants.dequantize` gives, rounded once to the dtype asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

Bytes = npt.NDArray[np.uint8]

_PIECE_VALUES = 1 << 18  # 1 MB of float32


def dequantized(raw: Bytes, shape: tuple[int, ...], kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """`raw`: all bytes of the tensor. Raises NotImplementedError for a format that `gguf` cannot read, ValueError for
    bytes that do not fit."""
    by_rows = raw.reshape(-1, gguf.quant_shape_to_byte_shape((shape[-1],), kind)[0])
    result = torch.empty(len(by_rows), shape[-1], dtype=dtype)
    read = _READERS.get(kind)
    rows = max(1, _PIECE_VALUES // shape[-1])
    for first in range(0, len(by_rows), rows):
        piece, to = by_rows[first : first + rows], result[first : first + rows]
        if read is None:
            to.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(piece, kind), np.float32)))
        else:
            _, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
            to.copy_(read(piece.reshape(-1, bytes_per_block)).view(to.shape))
    return result.view(shape)


def _halves(blocks: Bytes, count: int) -> torch.Tensor:
    """So many float16 at the beginning of each block → float32 [blocks, count]."""
    return torch.from_numpy(np.ascontiguousarray(blocks[:, : 2 * count]).view(np.float16)).float()


def _nibbles(packed: Bytes) -> torch.Tensor:
    """uint8 [blocks, n] → float32 [blocks, 2 n]: the lower halves, then the upper ones."""
    codes = torch.from_numpy(np.ascontiguousarray(packed))
    values = torch.empty(len(codes), 2 * codes.shape[1])
    values[:, : codes.shape[1]] = codes & 15
    values[:, codes.shape[1] :] = codes >> 4
    return values


def _q4_0(blocks: Bytes) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks, 1))


def _q4_1(blocks: Bytes) -> torch.Tensor:
    scales = _halves(blocks, 2)
    return _nibbles(blocks[:, 4:]).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Bytes) -> torch.Tensor:
    codes = torch.from_numpy(np.ascontiguousarray(blocks[:, 2:]).view(np.int8))
    return codes.float().mul_(_halves(blocks, 1))


_READERS: dict[Kind, Callable[[Bytes], torch.Tensor]] = {Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q8_0: _q8_0}
