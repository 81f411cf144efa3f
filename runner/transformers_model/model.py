"""A model of transformers as the runner calls it: packed tokens in, logits of the rows asked for out.

All tokens of a step are one sequence of transformers' batch of one, each with its own position; they see each other
only through the attention, which knows the requests. There is no HF cache.
"""

from __future__ import annotations

import msgspec
import torch

from actors.messages.model import ModelDescription
from runner.attention.asked import Asked
from runner.attention.variants import VariantAttention
from runner.device import Device
from runner.model.llama import Attention
from runner.transformers_model.attention import answered_by
from runner.transformers_model.loading import with_weights
from runner.transformers_model.proof import prove


class TransformersModel:
    def __init__(self, description: ModelDescription, device: Device) -> None:
        """Raises ConfigurationError: transformers is not installed, the weights do not fit, or it fails its proof."""
        self._context_length = description.context_length
        self._model = with_weights(description.weights, device.dtype, device.torch)
        prove(
            description,
            device,
            self._model,
            lambda batch, attention, rows: self.next_token_logits(batch.token_ids, batch.positions, attention, rows),
        )

    def next_token_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids, positions, rows int64 → float32 [rows, vocabulary]. `attention`: a VariantAttention."""
        assert isinstance(attention, VariantAttention)
        with answered_by(_Windowless(attention, self._context_length)):
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


class _Windowless:
    """Forgets windows that no request can outgrow, so that they take the plain way."""

    def __init__(self, attention: VariantAttention, context_length: int) -> None:
        self._attention, self._context_length = attention, context_length

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        if asked.window is not None and asked.window >= self._context_length:
            asked = msgspec.structs.replace(asked, window=None)
        return self._attention.attend(layer, query, key, value, asked)
