"""What a pool of some bytes holds, as `/debug/blocks` and `kvyard_kv_blocks` then tell it."""

from __future__ import annotations

from typing import Any

import pytest

from actors.configuration import EngineConfiguration
from actors.engine import kv_capacity
from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription

# SmolLM2-135M: 30 layers of 3 KV heads of 64.
MODEL = ModelDescription(
    folder="",
    weights="",
    architecture="llama",
    digest="aa",
    vocab_size=49_152,
    context_length=2_048,
    hidden_size=576,
    intermediate_size=1_536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
)
# Keys and values of 16 tokens. int8: 64 bytes and 2 of the scale.
BLOCK_BYTES = {
    ("bfloat16", "auto"): 30 * 3 * 2 * 16 * 128,
    ("float32", "auto"): 30 * 3 * 2 * 16 * 256,
    ("bfloat16", "int8"): 30 * 3 * 2 * 16 * 66,
    ("float32", "int8"): 30 * 3 * 2 * 16 * 66,
}


@pytest.mark.parametrize(("dtypes", "block_bytes"), BLOCK_BYTES.items(), ids=map("-".join, BLOCK_BYTES))
def test_blocks_in_so_many_bytes(dtypes: tuple[Any, Any], block_bytes: int) -> None:
    dtype, kv_dtype = dtypes

    def capacity(**settings: Any) -> int:
        return kv_capacity(EngineConfiguration(dtype=dtype, kv_dtype=kv_dtype, **settings), MODEL)

    assert capacity() == (1 << 30) // block_bytes
    assert capacity(kv_memory=10 * block_bytes - 1) == 9
    with pytest.raises(ConfigurationError, match=f"one block of 16 tokens has {block_bytes} bytes"):
        capacity(kv_memory=block_bytes - 1)


def test_how_many_more() -> None:
    """128 / 66 = 1.939 times the tokens of bfloat16: 5,648 blocks of 1 GiB, and not 2,912."""
    blocks = [kv_capacity(EngineConfiguration(kv_dtype=kv_dtype), MODEL) for kv_dtype in ("int8", "auto")]
    assert blocks == [5_648, 2_912]
