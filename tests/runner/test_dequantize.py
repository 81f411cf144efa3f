"""Expected: `gguf.quants.dequantize`, the reference of every format, rounded once by torch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from runner.weights.dequantize import _PIECE_VALUES, dequantized

INPUTS = 512


def stored(kind: Kind, rows: int) -> np.ndarray:
    """Random bytes of a matrix, its float16 numbers finite: one of two exponents, so that sums round."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(7).integers(0, 256, (rows * INPUTS // block, num_bytes), dtype=np.uint8)
    if kind is Kind.F32:
        return np.random.default_rng(7).standard_normal(rows * INPUTS, np.float32).view(np.uint8)
    for high_byte in {Kind.Q4_1: (1, 3), Kind.Q4_K: (1, 3), Kind.Q6_K: (209,)}.get(kind, (1,)):
        raw[:, high_byte] = raw[:, high_byte] & 0x83 | 0x28
    return raw.reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.F32])
def test_every_weight_is_gguf_s_own(kind: Kind, dtype: torch.dtype) -> None:
    rows = 3 + 2 * _PIECE_VALUES // INPUTS if kind is Kind.Q4_1 else 5  # three pieces, the last one short
    raw = stored(kind, rows)
    if kind is Kind.F16:
        raw = np.random.default_rng(7).standard_normal(rows * INPUTS).astype(np.float16).view(np.uint8)
    expected = np.array(gguf.quants.dequantize(raw.reshape(rows, -1), kind), np.float32)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 20
    result = dequantized(raw, (rows, INPUTS), kind, dtype)
    assert torch.equal(result, torch.from_numpy(expected).to(dtype))


def test_a_vector_keeps_its_shape() -> None:
    values = np.array([1.5, -2.0, 0.25], np.float32)
    assert dequantized(values.view(np.uint8), (3,), Kind.F32, torch.float32).tolist() == [1.5, -2.0, 0.25]
