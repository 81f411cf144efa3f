"""Weights by their Hugging Face names, one tensor at a time, whatever file they lie in.

Each tensor is read when taken and not kept, so that a model is never in memory twice. With `stored`, matrices that the
file holds quantised are given out as they are; everything else in the device's dtype.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

import torch

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.device import Device
from runner.weights.quantized import QuantizedMatrix

logger = logging.getLogger(__name__)


class WeightSource(ABC):
    """`read` is a format's own; the shapes are checked and the tensors ticked off here."""

    def __init__(self, description: ModelDescription, device: Device, names: Iterable[str], stored: bool) -> None:
        self._path, self._device = description.weights, device
        self._architecture = description.architecture
        self._stored = stored
        self._kinds: dict[str, Counter[str]] = {"as stored": Counter(), "dense": Counter()}  # of matrices
        self._shapes = expected_shapes(description)
        self._left = dict.fromkeys(names)
        if description.tie_word_embeddings:
            # Some files repeat the shared matrix.
            self._left.pop("lm_head.weight", None)

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor in any floating-point dtype, on the host."""

    @abstractmethod
    def kind(self, name: str) -> str:
        """What the file holds the tensor as, for people."""

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """The matrix as the file holds it; None when it does not hold one that is computed on as stored."""
        return None

    def take(self, name: str) -> torch.Tensor:
        """The tensor in the device's dtype, on the device. Each name once."""
        self._tick_off(name)
        tensor = self.read(name)
        self._check(name, tuple(tensor.shape))
        return tensor.to(self._device.torch, self._device.dtype)

    def take_matrix(self, name: str) -> torch.Tensor | QuantizedMatrix:
        """As `take`, or the matrix as it is stored."""
        matrix = self.read_quantized(name) if self._stored and name in self._left else None
        if matrix is None or not matrix.fits_float16:
            tensor = self.take(name)
            self._kinds["dense"][self.kind(name)] += 1
            return tensor
        self._tick_off(name)
        self._check(name, matrix.shape)
        self._kinds["as stored"][self.kind(name)] += 1
        return matrix

    def _tick_off(self, name: str) -> None:
        if name not in self._left:
            raise ConfigurationError(f"the weights {self._path} lack the tensor {name}")
        del self._left[name]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._shapes[name]:
            raise ConfigurationError(
                f"the weights {self._path} have {name} of shape {list(shape)}; "
                f"the model's configuration asks for {list(self._shapes[name])}"
            )

    def finish(self) -> None:
        """Raises when tensors are left over: the file is of another architecture than it says. Says what was stored."""
        if self._left:
            raise ConfigurationError(
                f"the weights {self._path} hold {len(self._left)} tensors that a {self._architecture} model does not "
                f"have, such as {next(iter(self._left))}"
            )
        if self._stored:
            logger.info("matrices %s", "; ".join(map(_counted, *zip(*self._kinds.items(), strict=True))))


def _counted(how: str, kinds: Counter[str]) -> str:
    """ "as stored: 211 (210 Q4_1, 1 Q8_0)"."""
    each = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{how}: {kinds.total()}" + (f" ({each})" if each else "")


def expected_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    d = description
    query, key = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (d.vocab_size, d.hidden_size),
        "model.norm.weight": (d.hidden_size,),
        "lm_head.weight": (d.vocab_size, d.hidden_size),
    }
    for index in range(d.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (d.hidden_size,),
            prefix + "post_attention_layernorm.weight": (d.hidden_size,),
            prefix + "self_attn.q_proj.weight": (query, d.hidden_size),
            prefix + "self_attn.k_proj.weight": (key, d.hidden_size),
            prefix + "self_attn.v_proj.weight": (key, d.hidden_size),
            prefix + "self_attn.o_proj.weight": (d.hidden_size, query),
            prefix + "mlp.gate_proj.weight": (d.intermediate_size, d.hidden_size),
            prefix + "mlp.up_proj.weight": (d.intermediate_size, d.hidden_size),
            prefix + "mlp.down_proj.weight": (d.hidden_size, d.intermediate_size),
        }
        if d.query_key_norm:
            shapes |= dict.fromkeys((f"{prefix}self_attn.{name}_norm.weight" for name in "qk"), (d.head_size,))
        for present, names in (
            (d.query_key_value_bias, ("self_attn.q", "self_attn.k", "self_attn.v")),
            (d.attention_output_bias, ("self_attn.o",)),
            (d.mlp_bias, ("mlp.gate", "mlp.up", "mlp.down")),
        ):
            if present:
                products = [f"{prefix}{name}_proj" for name in names]
                shapes |= {f"{product}.bias": shapes[f"{product}.weight"][:1] for product in products}
    return shapes
