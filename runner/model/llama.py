"""The llama family (Llama, Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the weights and the order of operations; how an operation is computed is the kernels' business, where keys and
values live the attention's. Query, key and value weights are one matrix, gate and up another. Intermediate dtypes
follow HF's modeling_llama, so that float32 agrees to rounding. Matrices are dense, or quantised as the file has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from actors.messages.model import ModelDescription
from runner.batch import Batch
from runner.device import Device, Linear
from runner.kernels.kernels import Attention, Kernels
from runner.kv_pool import KVPool
from runner.model.rope import angle_table
from runner.weights.quantized import QuantizedMatrix, joined
from runner.weights.source import WeightSource


def product_with(matrices: Sequence[torch.Tensor | QuantizedMatrix], kernels: Kernels) -> Linear:
    """One product with all of them, one below the other; what cannot be one matrix is multiplied with in turn."""
    products: list[Linear] = []
    for _, group in groupby(matrices, lambda matrix: getattr(matrix, "form", None)):
        alike = list(group)
        stored = [matrix for matrix in alike if isinstance(matrix, QuantizedMatrix)]
        dense = [matrix for matrix in alike if isinstance(matrix, torch.Tensor)]
        products.append(kernels.linear(kernels.pack(joined(stored) if stored else torch.cat(dense))))
    if len(products) == 1:
        return products[0]
    return lambda x: torch.cat([product(x) for product in products], -1)


class _Layer:
    def __init__(self, index: int, description: ModelDescription, source: WeightSource, kernels: Kernels) -> None:
        d, prefix = description, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def together(*names: str, bias: bool) -> Linear:
            product = product_with([source.take_matrix(f"{name}_proj.weight") for name in names], kernels)
            if not bias:
                return product
            added = torch.cat([source.take(f"{name}_proj.bias") for name in names])
            return lambda x: product(x).add_(added)

        self.attention_norm = source.take(prefix + "input_layernorm.weight")
        self.qkv = together(attention + "q", attention + "k", attention + "v", bias=d.query_key_value_bias)
        self.query_key_norm: torch.Tensor | None = None  # [heads + kv_heads, head_size]
        if d.query_key_norm:
            query, key = (source.take(f"{attention}{name}_norm.weight") for name in "qk")
            self.query_key_norm = torch.cat((query.expand(d.num_heads, -1), key.expand(d.num_kv_heads, -1)))
        self.output = together(attention + "o", bias=d.attention_output_bias)
        self.mlp_norm = source.take(prefix + "post_attention_layernorm.weight")
        self.gate_up = together(mlp + "gate", mlp + "up", bias=d.mlp_bias)
        self.down = together(mlp + "down", bias=d.mlp_bias)


class LlamaModel:
    def __init__(
        self,
        description: ModelDescription,
        source: WeightSource,
        device: Device,
        kernels: Kernels,
        max_positions: int,
    ) -> None:
        """Takes every tensor out of `source`. Raises ConfigurationError when one is missing, misshapen or left over."""
        self._description, self._kernels = description, kernels
        embedding = kernels.pack(source.take_matrix("model.embed_tokens.weight"))
        self._embed = kernels.embedding(embedding)
        self._layers = [_Layer(index, description, source, kernels) for index in range(description.num_layers)]
        self._norm = source.take("model.norm.weight")
        head = embedding
        if not description.tie_word_embeddings:
            head = kernels.pack(source.take_matrix("lm_head.weight"))
        self._head = kernels.linear(head, to_float32=True)
        source.finish()
        table = angle_table(description.head_size, description.rope_theta, description.rope_scaling, max_positions)
        self.angles = table.to(device.torch, device.dtype)  # [max_positions, head_size]

    def forward(self, token_ids: torch.Tensor, wanted: torch.Tensor, attention: Attention) -> torch.Tensor:
        """token_ids int64 [tokens] → hidden states of the tokens `wanted` [wanted, hidden], before the last norm.

        Every token leaves its keys and values in every layer; behind the last attention only the wanted ones go on.
        """
        kernels, epsilon = self._kernels, self._description.rms_norm_eps
        hidden, delta = self._embed(token_ids), None
        for index, layer in enumerate(self._layers):
            normed = kernels.add_rms_norm(hidden, delta, layer.attention_norm, epsilon)
            qkv = layer.qkv(normed)
            if layer.query_key_norm is not None:
                self._normalise_heads(qkv, layer.query_key_norm)
            attended = attention.attend(index, qkv)
            if index == len(self._layers) - 1:
                hidden, attended = hidden[wanted], attended[wanted]
                if not len(wanted):
                    return hidden
            normed = kernels.add_rms_norm(hidden, layer.output(attended), layer.mlp_norm, epsilon)
            delta = layer.down(kernels.swiglu(layer.gate_up(normed)))
        return hidden if delta is None else hidden.add_(delta)

    def logits_of(self, batch: Batch, pool: KVPool, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of the packed tokens int64 `rows`; the pool gets the batch's keys and values."""
        attention = self._kernels.attention(pool, batch, self.angles)
        return self.logits(self.forward(batch.token_ids, rows, attention))

    def _normalise_heads(self, qkv: torch.Tensor, weight: torch.Tensor) -> None:
        """Queries and keys, in place. weight [heads + kv_heads, head_size]."""
        heads = qkv.view(len(qkv), -1, weight.shape[-1])[:, : len(weight)]
        wide = heads.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._description.rms_norm_eps))
        heads.copy_((wide * scale).to(qkv.dtype).mul_(weight))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden], given away → float32 [rows, vocabulary]."""
        if not len(hidden):
            return hidden.new_empty(0, self._description.vocab_size, dtype=torch.float32)
        normed = self._kernels.add_rms_norm(hidden, None, self._norm, self._description.rms_norm_eps)
        return self._head(normed)
