"""The operators in plain torch, one function each, as their schemas in operators.py say: what the native ones are
measured against, and what runs where there is no kernel. Written to be read; works on any device and looks at no value,
except `paged_attention` and `draw`, which read the batch's shape and how to draw.

Intermediate dtypes follow HF's modeling_llama, so that float32 agrees to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runner.kernels import packed_dense
from runner.kernels.packed import PANEL, unpacked
from runner.kv_quantisation import dequantise, quantise
from runner.sampling import gumbel

ACTIVATION_GROUP = 32  # inputs of one scale, where activations are whole numbers
SMALLEST_ACTIVATION = 1e-35  # a group that reaches no further is zero


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    if delta is not None:
        residual.add_(delta)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(epsilon))
    return (wide * scale).to(residual.dtype).mul_(weight)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    return packed_dense.pack(weight)


def packed_linear(input: torch.Tensor, packed: torch.Tensor, outputs: int, to_float32: bool = False) -> torch.Tensor:
    weight = packed_dense.unpacked(packed, outputs, input.shape[1])
    return F.linear(input.float(), weight.float()) if to_float32 else F.linear(input, weight)


def packed_embedding(token_ids: torch.Tensor, packed: torch.Tensor, outputs: int, like: torch.Tensor) -> torch.Tensor:
    return packed_dense.unpacked(packed, outputs, len(like))[token_ids]


def rounded_rows(input: torch.Tensor) -> torch.Tensor:
    """float32 [rows, inputs]: each 32 values of a row as multiples of a 127th of the largest, up to 127 of them.

    A group with a value that is not finite is NaN.
    """
    groups = input.float().view(len(input), -1, ACTIVATION_GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    counted = largest > SMALLEST_ACTIVATION  # below it the quotient overflows
    codes = (
        groups * largest.new_tensor(127).div(largest)
    ).round_()  # 127 / largest would be a reciprocal, rounded twice
    finite = largest.isfinite()
    scales = torch.where(finite, largest / 127, torch.nan)
    return torch.where(counted | ~finite, codes * scales, 0.0).view(input.shape)


def quantized_linear(
    input: torch.Tensor,
    panels: torch.Tensor,
    outputs: int,
    bits: int,
    group: int,
    has_minima: bool,
    to_float32: bool = False,
) -> torch.Tensor:
    weight = unpacked(panels, input.shape[1], bits, group, has_minima).flatten(0, 1)[:outputs]
    product = F.linear(rounded_rows(input), weight)
    return product if to_float32 else product.to(input.dtype)


def quantized_embedding(
    token_ids: torch.Tensor, panels: torch.Tensor, like: torch.Tensor, bits: int, group: int, has_minima: bool
) -> torch.Tensor:
    """`like` [hidden] says the width and the dtype of the result [tokens, hidden]."""
    rows = unpacked(panels[token_ids // PANEL], len(like), bits, group, has_minima)
    return rows[torch.arange(len(rows), device=rows.device), token_ids % PANEL].to(like.dtype)


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Row by row, by sorting everything."""
    chosen = []
    for row, temperature in enumerate(temperatures.tolist()):
        values, tokens = logits[row].sort(descending=True, stable=True)
        if temperature <= 0:
            chosen.append(int(tokens[0]))
            continue
        scaled = (values / temperature)[: int(top_k[row])]
        probabilities = scaled.double().softmax(-1)
        stays = probabilities.cumsum(-1) - probabilities < float(top_p[row])
        if float(top_p[row]) >= 1:
            stays[:] = True
        stays[0] = True
        race = scaled + gumbel(tokens[None, : len(scaled)].to(torch.int32), keys[row : row + 1])[0]
        chosen.append(int(tokens[race.masked_fill(~stays, -torch.inf).argmax()]))
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> None:
    """heads [tokens, heads, head_size], in place; angles [tokens, head_size]: cosines, then sines."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = first * cos
    turned.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


def store(
    kind: int, states: torch.Tensor, pool: torch.Tensor, stored: torch.Tensor, layer: int, scales: torch.Tensor | None
) -> None:
    """Keys (0) or values (1) [tokens, kv_heads, head_size] into the rows that `stored` says for layer 0."""
    layers, block_size, head_size = pool.shape[2], *pool.shape[-2:]
    states = states.reshape(-1, head_size)
    if scales is None:
        pool.view(-1, head_size)[(2 * layer + kind) * block_size :].index_copy_(0, stored, states)
        return
    rows_of_a_head = 2 * layers * block_size
    where = stored // rows_of_a_head, stored % rows_of_a_head
    quantised, steps = quantise(states)
    pool.flatten(0, 1)[:, layer, kind].index_put_(where, quantised)
    scales.flatten(0, 1)[:, layer, kind].index_put_(where, steps)


def rotate_and_store(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    stored: torch.Tensor,
    layer: int,
    scales: torch.Tensor | None = None,
) -> None:
    kv_heads, head_size = pool.shape[1], pool.shape[-1]
    heads = qkv.view(len(qkv), -1, head_size)
    rotate(heads[:, :-kv_heads], angles[positions])
    store(0, heads[:, -2 * kv_heads : -kv_heads], pool, stored, layer, scales)
    store(1, heads[:, -kv_heads:], pool, stored, layer, scales)


def paged_attention(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    layer: int,
    scale: float,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float32 whatever the dtype."""
    kv_heads, head_size = pool.shape[1], pool.shape[-1]
    queries = qkv.view(len(qkv), -1, head_size)[:, : -2 * kv_heads].float()
    group_size = queries.shape[1] // kv_heads
    out = torch.zeros_like(queries)
    for table, start, end, context in zip(
        block_tables.long(), starts[:-1].tolist(), starts[1:].tolist(), contexts.tolist(), strict=True
    ):
        seen = context + end - start
        own = table[: -(-seen // pool.shape[-2])]
        blocks = pool[own, :, layer].float()
        if scales is not None:
            blocks = dequantise(blocks, scales[own, :, layer], torch.float32)
        # [2, kv_heads, blocks · block_size, head_size]
        states = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)
        keys, values = states[:, :, :seen].repeat_interleave(group_size, 1)
        hidden = torch.ones(end - start, seen, dtype=torch.bool, device=qkv.device).triu(context + 1)
        scores = torch.einsum("thd,hsd->hts", queries[start:end], keys) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hts,hsd->thd", weights, values)
    return out.flatten(1).to(qkv.dtype)
