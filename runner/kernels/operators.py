"""The operators as torch knows them, `torch.ops.kvyard.*`: schemas, fake implementations, and the reference for every
device without a kernel of its own. A backend adds its kernels under its dispatch key (cpu/operators.cpp under CPU).

| operator | says |
|---|---|
| add_rms_norm | residual += delta in place (delta may be absent); its norm times weight |
| rotate_and_store | queries and keys of the fused product turned in place; keys and values into the pool |
| paged_attention | each row's queries over the row's blocks, prefills and decodes in one call |
| swiglu | silu of the first half times the second |
| draw | one token of each row of float32 logits, see runner/sampling.py |
| pack_weight | a bfloat16 weight matrix [outputs, inputs] in fewer bytes, see packed_dense.py |
| packed_linear | input · weightᵀ of such a matrix |
| packed_embedding | rows of such a matrix |
| quantized_linear | the same of a quantised one, see packed.py; activations become whole numbers too |
| quantized_embedding | rows of a quantised matrix as numbers |

pool [blocks, kv_heads, layers, 2, block_size, head_size]; scales, of an int8 pool only, bfloat16 [blocks, kv_heads,
layers, 2, block_size], see kv_quantisation.py; the layers of a head are dense, heads may lie apart; qkv [tokens,
(heads + 2 · kv_heads) · head_size]; angles [positions, head_size]; positions int64 [tokens]; stored int64 [tokens ·
kv_heads], see `Batch.stored`; block_tables int32 [rows, most blocks]; starts int32 [rows + 1], each row's first token
and the end; contexts int32 [rows], tokens before it. temperatures float32 [rows], 0 for greedy; top_k int64, the
vocabulary's size for none; top_p float32; keys int32 [rows, 2].
"""

from __future__ import annotations

import torch

from runner.kernels import reference

_LIBRARY = torch.library.Library("kvyard", "DEF")  # type: ignore[no-untyped-call]


def _fake_add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    return residual.new_empty(residual.shape)


def _fake_rotate_and_store(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    stored: torch.Tensor,
    layer: int,
    scales: torch.Tensor | None = None,
) -> None:
    return None


def _fake_paged_attention(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    layer: int,
    scale: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * pool.shape[1] * pool.shape[-1])


def _fake_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_pack_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


def _fake_product(input: torch.Tensor, outputs: int, to_float32: bool) -> torch.Tensor:
    return input.new_empty(input.shape[0], outputs, dtype=torch.float32 if to_float32 else input.dtype)


def _fake_packed_linear(
    input: torch.Tensor, packed: torch.Tensor, outputs: int, to_float32: bool = False
) -> torch.Tensor:
    return _fake_product(input, outputs, to_float32)


def _fake_packed_embedding(
    token_ids: torch.Tensor, packed: torch.Tensor, outputs: int, like: torch.Tensor
) -> torch.Tensor:
    return like.new_empty(len(token_ids), len(like))


def _fake_quantized_linear(
    input: torch.Tensor,
    panels: torch.Tensor,
    outputs: int,
    bits: int,
    group: int,
    has_minima: bool,
    to_float32: bool = False,
) -> torch.Tensor:
    return _fake_product(input, outputs, to_float32)


def _fake_quantized_embedding(
    token_ids: torch.Tensor, panels: torch.Tensor, like: torch.Tensor, bits: int, group: int, has_minima: bool
) -> torch.Tensor:
    return like.new_empty(len(token_ids), len(like))


def _fake_draw(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


for _schema, _implementation, _fake in (
    (
        "add_rms_norm(Tensor(a!) residual, Tensor? delta, Tensor weight, float epsilon) -> Tensor",
        reference.add_rms_norm,
        _fake_add_rms_norm,
    ),
    (
        "rotate_and_store(Tensor(a!) qkv, Tensor angles, Tensor positions, Tensor(b!) pool, Tensor stored, int layer, "
        "Tensor(c!)? scales=None) -> ()",
        reference.rotate_and_store,
        _fake_rotate_and_store,
    ),
    (
        "paged_attention(Tensor qkv, Tensor pool, Tensor block_tables, Tensor starts, Tensor contexts, int layer, "
        "float scale, Tensor? scales=None) -> Tensor",
        reference.paged_attention,
        _fake_paged_attention,
    ),
    ("swiglu(Tensor gate_up) -> Tensor", reference.swiglu, _fake_swiglu),
    (
        "draw(Tensor logits, Tensor temperatures, Tensor top_k, Tensor top_p, Tensor keys) -> Tensor",
        reference.draw,
        _fake_draw,
    ),
    ("pack_weight(Tensor weight) -> Tensor", reference.pack_weight, _fake_pack_weight),
    (
        "packed_linear(Tensor input, Tensor packed, int outputs, bool to_float32=False) -> Tensor",
        reference.packed_linear,
        _fake_packed_linear,
    ),
    (
        "packed_embedding(Tensor token_ids, Tensor packed, int outputs, Tensor like) -> Tensor",
        reference.packed_embedding,
        _fake_packed_embedding,
    ),
    (
        "quantized_linear(Tensor input, Tensor panels, int outputs, int bits, int group, bool has_minima, "
        "bool to_float32=False) -> Tensor",
        reference.quantized_linear,
        _fake_quantized_linear,
    ),
    (
        "quantized_embedding(Tensor token_ids, Tensor panels, Tensor like, int bits, int group, bool has_minima) "
        "-> Tensor",
        reference.quantized_embedding,
        _fake_quantized_embedding,
    ),
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kvyard::{_name}", _fake, lib=_LIBRARY)
