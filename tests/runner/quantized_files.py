"""GGUF files of a tiny llama whose matrices are in a chosen quantisation: random blocks, every bit pattern valid.

The gguf package cannot quantise to Q4_K, Q5_K and Q6_K, so blocks are made from random bytes with sensible scales; what
they mean is then its `dequantize`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
STORED = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY, LAYERS = 256, 512, 4, 2, 304, 2
# Where a block has its float16 numbers, and how large they are for weights of about 1/16.
SCALES = {
    Kind.Q4_0: {0: 0.016},
    Kind.Q4_1: {0: 0.016, 2: -0.12},
    Kind.Q8_0: {0: 0.001},
    Kind.Q4_K: {0: 0.0005, 2: 0.0037},
    Kind.Q5_K: {0: 0.00025, 2: 0.0037},
    Kind.Q6_K: {208: 0.00005},
}
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}


def random_blocks(kind: Kind, outputs: int, inputs: int, generator: np.random.Generator) -> np.ndarray:
    """uint8 [outputs, bytes of a row]."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (outputs, inputs // values, num_bytes), np.uint8)
    for at, size in SCALES[kind].items():
        numbers = (size * generator.uniform(0.7, 1.3, (outputs, inputs // values, 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers.view(np.uint8)
    return blocks.reshape(outputs, -1)


def write_llama(path: Path, default: Kind, kinds: Mapping[str, Kind] | None = None, tied: bool = True) -> Path:
    """`kinds`: by a tensor's name without the layer, where it is not `default`."""
    generator = np.random.default_rng(6)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 1"])

    def matrix(name: str, shape: tuple[int, int]) -> None:
        kind = (kinds or {}).get(name.rsplit(".", 1)[-1], default)
        if kind in SCALES:
            writer.add_tensor(f"{name}.weight", random_blocks(kind, *shape, generator), raw_dtype=kind)
        else:
            values = generator.normal(0, 1 / 16, shape)
            writer.add_tensor(f"{name}.weight", values.astype(np.float16 if kind is Kind.F16 else np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", generator.uniform(0.5, 1.5, HIDDEN).astype(np.float32))

    matrix("token_embd", (VOCABULARY, HIDDEN))
    norm("output_norm")
    if not tied:
        matrix("output", (VOCABULARY, HIDDEN))
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
        for name, shape in MATRICES.items():
            matrix(f"blk.{layer}.{name}", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
