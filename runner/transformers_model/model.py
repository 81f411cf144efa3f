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
from runner.batch import Batch
from runner.device import Device
from runner.kv_pool import KVPool
from runner.transformers_model.attention import answered_by
from runner.transformers_model.loading import with_weights
from runner.transformers_model.proof import prove


class TransformersModel:
    def __init__(self, description: ModelDescription, device: Device) -> None:
        """Raises ConfigurationError: transformers is not installed, the weights do not fit, or it fails its proof."""
        self._device, self._context_length = device, description.context_length
        self._model = with_weights(description.weights, device.dtype, device.torch)
        prove(
            description,
            device,
            self._model,
            self.logits_of,
        )

    def logits_of(self, batch: Batch, pool: KVPool, rows: torch.Tensor) -> torch.Tensor:
        """As `LlamaModel.logits_of`."""
        attention = VariantAttention(pool, self._device, batch)
        with answered_by(_Windowless(attention, self._context_length)):
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
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
        return self._attention.answer(layer, query, key, value, asked)
