"""Weights of a GGUF file, under their Hugging Face names: dequantised, or as they are stored."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.device import Device
from runner.weights.dequantize import dequantized
from runner.weights.gguf_header import GGUFTensor, read_gguf_header
from runner.weights.quantized import Bytes, QuantizedMatrix, quantized
from runner.weights.source import WeightSource

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# Goes into the description's rope_scaling, see the store.
_ROPE_FACTORS = "rope_freqs.weight"


def hugging_face_name(name: str) -> str:
    """The HF name of a llama family's tensor; a name that is not one stays as it is."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _OF_LAYER:
        return _GLOBAL.get(name, name)
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.{match[3]}"


def rotary_halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[heads · head_size, in]: llama GGUFs have the two dimensions that turn together side by side, HF half a head
    apart."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class GGUFSource(WeightSource):
    def __init__(self, description: ModelDescription, device: Device, stored: bool) -> None:
        header = read_gguf_header(Path(description.weights))
        self._tensors = {hugging_face_name(name): tensor for name, tensor in header.tensors.items()}
        super().__init__(description, device, [name for name in self._tensors if name != _ROPE_FACTORS], stored)
        self._heads: dict[str, int] = {}  # of what lies interleaved
        if description.architecture == "llama":
            self._heads = {"q_proj": description.num_heads, "k_proj": description.num_kv_heads}
        self._data = np.memmap(description.weights, np.uint8, "r")

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            weight = dequantized(self._raw(tensor), tensor.shape, tensor.quantization, self._device.dtype)
        except (NotImplementedError, ValueError) as error:
            raise ConfigurationError(
                f"{self._path}: tensor {name} is in {tensor.quantization.name}, which cannot be read: {error}"
            ) from error
        heads = self._interleaved_heads(name)
        return weight if heads is None or weight.ndim != 2 else rotary_halves_apart(weight, heads)

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        tensor = self._tensors[name]
        matrix = quantized(self._raw(tensor), tensor.shape, tensor.quantization)
        heads = self._interleaved_heads(name)
        return matrix if matrix is None or heads is None else matrix.reordered(lambda m: rotary_halves_apart(m, heads))

    def kind(self, name: str) -> str:
        return str(self._tensors[name].quantization.name)

    def _raw(self, tensor: GGUFTensor) -> Bytes:
        return self._data[tensor.offset : tensor.offset + tensor.num_bytes]

    def _interleaved_heads(self, name: str) -> int | None:
        return self._heads.get(name.split(".")[-2])
