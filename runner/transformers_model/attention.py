"""The attention that transformers' layers call: it hands each layer's queries, keys and values to the paged KV pool.

transformers knows it by the name IMPLEMENTATION, for which it makes no masks. What a layer asks for beyond scale,
softcap and window is an error, never ignored. Who answers is set for the time of one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from runner.attention.asked import Asked

IMPLEMENTATION = "kvyard"
# Handed on by layers to whatever attention there is, without a meaning for this one; `is_causal` is looked at.
_WITHOUT_MEANING = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "cache",
    "past_key_values",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "layer_idx",
    "layer_type",
    "return_dict",
}
_NEUTRAL = {"is_causal": True}


class Answering(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """As runner/kernels/kernels.py's Attention, to what the layer asks."""


class NotServed(Exception):
    """The model asks for something that paged attention does not do. The text begins with what it is."""


_answering: ContextVar[Answering] = ContextVar("answering")


@contextmanager
def answered_by(answering: Answering) -> Iterator[None]:
    token = _answering.set(answering)
    try:
        yield
    finally:
        _answering.reset(token)


def register() -> None:
    """Imports transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_size], key and value with kv_heads instead → [1, tokens, heads, head_size].

    The face is transformers' `AttentionInterface`. Raises NotServed.
    """
    if attention_mask is not None:
        raise NotServed("attention_mask: its layers make masks of their own")
    for name, value_given in others.items():
        if name not in _WITHOUT_MEANING and value_given is not None and value_given != _NEUTRAL.get(name):
            raise NotServed(f"{name}: its layers hand this to their attention, and kvyard's does not know it")
    if getattr(module, "is_causal", True) is False:
        raise NotServed("is_causal false: its layers look at tokens that come later")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise NotServed("layer_idx: its attention does not know which layer it is of")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    _, heads, tokens, _ = query.shape
    asked = Asked(scale, softcap, sliding_window)
    attended = _answering.get().attend(layer, _packed(query), _packed(key), _packed(value), asked)
    return attended.view(1, tokens, heads, -1), None


def _packed(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, head_size] → [tokens, heads, head_size]."""
    return states[0].transpose(0, 1).contiguous()
