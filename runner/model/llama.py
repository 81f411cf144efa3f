"""The llama family (Llama, Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the weights and the order of operations; where keys and values live is the attention's business. Query, key and
value weights are one matrix, gate and up another. Intermediate dtypes follow HF's modeling_llama, so that float32
agrees to rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from actors.messages.model import ModelDescription
from runner.device import Device, Linear
from runner.model.rope import RotaryEmbedding
from runner.weights.source import WeightSource


class Attention(Protocol):
    """Where one forward pass puts its keys and values and what its queries look at."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size] → [tokens, heads · head_size].

        Key and value of every token are stored first; then each query sees its request's tokens up to itself.
        """


class _Layer:
    def __init__(self, index: int, description: ModelDescription, source: WeightSource, device: Device) -> None:
        d, prefix = description, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def together(*names: str, bias: bool) -> Linear:
            product = device.linear(torch.cat([source.take(f"{name}_proj.weight") for name in names]))
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
    def __init__(self, description: ModelDescription, source: WeightSource, device: Device, max_positions: int) -> None:
        """Takes every tensor out of `source`. Raises ConfigurationError when one is missing, misshapen or left over."""
        self._description = description
        self._embedding = source.take("model.embed_tokens.weight")
        self._layers = [_Layer(index, description, source, device) for index in range(description.num_layers)]
        self._norm = source.take("model.norm.weight")
        if description.tie_word_embeddings:
            head = self._embedding
            self._head: Linear = lambda x: F.linear(x, head)
        else:
            self._head = device.linear(source.take("lm_head.weight"))
        source.finish()
        self._rope = RotaryEmbedding(
            description.head_size,
            description.rope_theta,
            description.rope_scaling,
            max_positions,
            device.dtype,
            device.torch,
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """token_ids, positions int64 [tokens] → hidden states [tokens, hidden], before the last norm."""
        d = self._description
        hidden = F.embedding(token_ids, self._embedding)
        angles = self._rope.angles(positions)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(self._rms_norm(hidden, layer.attention_norm)).view(len(hidden), -1, d.head_size)
            query_key = heads[:, : d.num_heads + d.num_kv_heads]
            if layer.query_key_norm is not None:
                query_key = self._rms_norm(query_key, layer.query_key_norm)
            query_key = self._rope.rotate(query_key, angles)
            value = heads[:, d.num_heads + d.num_kv_heads :]
            attended = attention.attend(index, query_key[:, : d.num_heads], query_key[:, d.num_heads :], value)
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return hidden

    def next_token_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor
    ) -> torch.Tensor:
        """`forward`, then `logits` of the packed tokens int64 `rows`."""
        return self.logits(self.forward(token_ids, positions, attention)[rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] → float32 [rows, vocabulary]."""
        return self._head(self._rms_norm(hidden, self._norm)).float()

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._description.rms_norm_eps))
        return (wide * scale).to(x.dtype).mul_(weight)
