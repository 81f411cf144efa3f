"""Matrices as a GGUF stores them: small whole numbers, and a scale (or a scale and a minimum) for each group of a row.

        weight = (code - zero) · scale            without minima
        weight = code · scale + minimum           with minima

Owns the bits of the five formats that are computed on as stored. Invariant: the two lines above give every weight of
the file exactly, in float32, as the file's format defines it (llama.cpp's ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Kind: TypeAlias = gguf.GGMLQuantizationType


class QuantizedMatrix(msgspec.Struct, frozen=True):
    """On the host. `codes` uint8 [outputs, inputs]; `scales` and `minima` float32 [outputs, inputs / group]."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bits: int  # 4 or 8
    group: int  # 32 or 16

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def form(self) -> tuple[int, int, bool]:
        """Matrices of one form can be joined."""
        return self.bits, self.group, self.minima is not None

    @property
    def zero(self) -> int:
        """The code of weight 0 where there are no minima."""
        return 1 << (self.bits - 1) if self.minima is None else 0

    @property
    def fits_float16(self) -> bool:
        """Whether float16 holds scales and minima to 2^-11 of the largest; always, if the file has them so."""
        parts = [self.scales] if self.minima is None else [self.scales, self.minima]
        return all(
            bool(((part.half().float() - part).abs() <= 2**-11 * part.abs().max()).all())  # an infinity is not
            for part in parts
        )

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """`order` moves the rows of a matrix [outputs, columns], whatever its columns are."""
        minima = None if self.minima is None else order(self.minima)
        return msgspec.structs.replace(self, codes=order(self.codes), scales=order(self.scales), minima=minima)

    def rows(self, first: int, last: int) -> Self:
        return self.reordered(lambda matrix: matrix[first:last])

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        grouped = self.codes.float().view(len(self.codes), -1, self.group).sub_(self.zero)
        grouped *= self.scales[..., None]
        if self.minima is not None:
            grouped += self.minima[..., None]
        return grouped.view(self.codes.shape)


def joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One below the other. All of one form."""
    first = matrices[0]
    assert all(matrix.form == first.form for matrix in matrices)
    minima = [matrix.minima for matrix in matrices if matrix.minima is not None]
    return msgspec.structs.replace(
        first,
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        minima=torch.cat(minima) if minima else None,
    )


def quantized(raw: Bytes, shape: tuple[int, ...], kind: Kind) -> QuantizedMatrix | None:
    """The matrix of a tensor's bytes; None for a tensor that is no matrix, or of a kind that is not computed on."""
    reader = _READERS.get(kind)
    if reader is None or len(shape) != 2:
        return None
    _, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    codes, scales, minima, bits, group = reader(raw.reshape(-1, bytes_per_block))
    outputs = shape[0]
    return QuantizedMatrix(
        torch.from_numpy(codes.reshape(shape)),
        torch.from_numpy(scales.reshape(outputs, -1)),
        None if minima is None else torch.from_numpy(minima.reshape(outputs, -1)),
        bits,
        group,
    )


_Read = tuple[Bytes, Floats, Floats | None, int, int]  # codes, scales, minima, bits, group; all [blocks, …]


def _halves(blocks: Bytes, at: int) -> Floats:
    """float16 at a byte of each block → [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The lower halves of the last axis' bytes, then the upper ones."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _q4_0(blocks: Bytes) -> _Read:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None, 4, 32


def _q4_1(blocks: Bytes) -> _Read:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2), 4, 32


def _q8_0(blocks: Bytes) -> _Read:
    return blocks[:, 2:] ^ np.uint8(0x80), _halves(blocks, 0), None, 8, 32  # int8 + 128


def _q4_k(blocks: Bytes) -> _Read:
    """256 values: two float16, eight scales and minima of six bits in twelve bytes, then nibbles, 64 values by 64."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), -1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), -1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes, _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minima), 4, 32


def _q6_k(blocks: Bytes) -> _Read:
    """256 values of six bits about 32: 2 · 64 bytes of lower four, 2 · 32 of upper two; 16 scales; float16."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    codes = (low | high << 4) + np.uint8(128 - 32)
    return codes.astype(np.uint8), _halves(blocks, 208) * scales, None, 8, 16


_READERS: dict[Kind, Callable[[Bytes], _Read]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
}
