"""What of transformers' models cannot be served over a paged KV pool, each with the field that says so.

`of_configuration` looks at the fields, `of_model` at the model without weights: one forward pass on the meta device
records what its layers ask of their attention, so that nothing is assumed about an architecture.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import torch

from runner.attention.asked import Asked
from runner.transformers_model.attention import NotServed, answered_by
from runner.transformers_model.loading import without_weights

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_PROBE_TOKENS = 4


class Call(msgspec.Struct, frozen=True):
    """Of one layer's attention. Shapes: tokens, heads, head size."""

    layer: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    window: int | None


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        self.calls.append(Call(layer, tuple(query.shape), tuple(key.shape), tuple(value.shape), asked.window))
        return query.new_empty(query.shape[0], query.shape[1] * value.shape[2])


def of_configuration(configuration: Any) -> None:
    """Raises NotServed."""

    def get(name: str) -> Any:
        return getattr(configuration, name, None)

    if get("is_encoder_decoder"):
        raise NotServed("is_encoder_decoder true: kvyard serves models that only decode")
    if get("add_cross_attention"):
        raise NotServed("add_cross_attention true: its keys would come from an encoder")
    if configuration.get_text_config() is not configuration:
        raise NotServed("text_config: it is a model of more than text. Save its text model as a folder of its own")
    for name in ("state_size", "mamba_d_state"):
        if get(name):
            raise NotServed(f"{name} {get(name)}: a state space keeps state that is no keys and values")
    if get("is_causal") is False or get("use_bidirectional_attention"):
        raise NotServed("is_causal false: tokens that come later would change keys that are computed")
    if get("attention_chunk_size"):
        raise NotServed("attention_chunk_size: kvyard has no chunked attention")
    if others := sorted(set(get("layer_types") or ()) - _KNOWN_LAYERS):
        raise NotServed(f"layer_types {', '.join(others)}: kvyard keeps keys and values, no other state of a layer")
    for kind in sorted(_rope_types(get("rope_parameters"))):
        if kind.startswith("dynamic") or kind == "longrope":
            raise NotServed(f"rope_type {kind}: its angles change with the longest request of a step")


def of_model(configuration: Any) -> list[Call]:
    """The calls of the configuration's model, one for each layer. Raises NotServed."""
    try:
        model = without_weights(configuration)
    except Exception as error:
        raise NotServed(
            f"model_type {configuration.model_type}: transformers does not build it with an attention of ours "
            f"({_first_line(error)})"
        ) from error
    taken = set(inspect.signature(model.forward).parameters)
    for name in ("position_ids", "logits_to_keep"):
        if name not in taken:
            raise NotServed(f"model_type {configuration.model_type}: its forward takes no {name}")
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise NotServed(f"model_type {configuration.model_type}: a convolution over tokens keeps state beside the KV")
    _answer_for_experts(model)
    calls = _recorded(model, configuration)
    num_layers = configuration.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise NotServed(
            f"model_type {configuration.model_type}: num_hidden_layers is {num_layers}, but {len(calls)} times a layer "
            "asked transformers' exchangeable attention"
        )
    first = calls[0]
    for call in calls:
        if (call.query, call.key) != (first.query, first.key):
            raise NotServed(f"layer {call.layer} has other heads than layer 0: {call.key[1:]} and {first.key[1:]}")
        if not call.query[2] == call.key[2] == call.value[2]:
            raise NotServed(f"head sizes {call.query[2]} of keys and {call.value[2]} of values: they must be equal")
    context = getattr(configuration, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise NotServed("max_position_embeddings is not given: the context's length is not known")
    window = getattr(configuration, "sliding_window", None)
    used = getattr(configuration, "use_sliding_window", True) is not False
    within = window is not None and window < context
    if used and within and all(call.window is None for call in calls):
        raise NotServed(f"sliding_window {window}: its layers do not tell their attention of it")
    return calls


def _recorded(model: torch.nn.Module, configuration: Any) -> list[Call]:
    recorder = _Recorder()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), answered_by(recorder):
            model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=rows)
    except NotServed:
        raise
    except Exception as error:
        raise NotServed(
            f"model_type {configuration.model_type}: its code does not run without a cache ({_first_line(error)})"
        ) from error
    return recorder.calls


def _answer_for_experts(model: torch.nn.Module) -> None:
    """Which expert computes what depends on values, and here there are none; tokens do not meet in an expert."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _rope_types(parameters: Any) -> set[str]:
    """Of rope_parameters, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {str(parameters[name]) for name in ("rope_type", "type") if parameters.get(name)}
    return kinds.union(*(_rope_types(value) for value in parameters.values()))
