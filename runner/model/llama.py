"""The llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the weights and the order of operations; how an operation is computed is the kernels' business, where keys and
values live the attention's. Query, key and value weights are one matrix, gate and up another. Intermediate dtypes
follow HF's modeling_llama, so that float32 agrees to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actors.messages.model import ModelDescription
from runner.device import Device, Linear
from runner.kernels.kernels import Attention, Kernels
from runner.model.rope import angle_table
from runner.weights.source import WeightSource


class _Layer:
    def __init__(self, index: int, source: WeightSource, kernels: Kernels) -> None:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def together(*names: str) -> Linear:
            return kernels.linear(torch.cat([source.take(f"{name}_proj.weight") for name in names]))

        self.attention_norm = source.take(prefix + "input_layernorm.weight")
        self.qkv = together(attention + "q", attention + "k", attention + "v")
        self.output = together(attention + "o")
        self.mlp_norm = source.take(prefix + "post_attention_layernorm.weight")
        self.gate_up = together(mlp + "gate", mlp + "up")
        self.down = together(mlp + "down")


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
        self._embedding = source.take("model.embed_tokens.weight")
        self._layers = [_Layer(index, source, kernels) for index in range(description.num_layers)]
        self._norm = source.take("model.norm.weight")
        head = self._embedding if description.tie_word_embeddings else source.take("lm_head.weight")
        self._head = kernels.linear(head)
        source.finish()
        table = angle_table(description.head_size, description.rope_theta, description.rope_scaling, max_positions)
        self.angles = table.to(device.torch, device.dtype)  # [max_positions, head_size]

    def forward(self, token_ids: torch.Tensor, wanted: torch.Tensor, attention: Attention) -> torch.Tensor:
        """token_ids int64 [tokens] → hidden states of the tokens `wanted` [wanted, hidden], before the last norm.

        Every token leaves its keys and values in every layer; behind the last attention only the wanted ones go on.
        """
        kernels, epsilon = self._kernels, self._description.rms_norm_eps
        hidden, delta = F.embedding(token_ids, self._embedding), None
        for index, layer in enumerate(self._layers):
            normed = kernels.add_rms_norm(hidden, delta, layer.attention_norm, epsilon)
            attended = attention.attend(index, layer.qkv(normed))
            if index == len(self._layers) - 1:
                hidden, attended = hidden[wanted], attended[wanted]
                if not len(wanted):
                    return hidden
            normed = kernels.add_rms_norm(hidden, layer.output(attended), layer.mlp_norm, epsilon)
            delta = layer.down(kernels.swiglu(layer.gate_up(normed)))
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden], given away → float32 [rows, vocabulary]."""
        if not len(hidden):
            return hidden.new_empty(0, self._description.vocab_size, dtype=torch.float32)
        normed = self._kernels.add_rms_norm(hidden, None, self._norm, self._description.rms_norm_eps)
        return self._head(normed).float()
