"""Which Hugging Face configurations the native model (runner/model/llama.py) computes, and with what numbers.

`obstacle` names the first field that it does not compute; such a model goes through transformers' own code instead.
The defaults are those of the families' config classes in transformers: a config.json may leave them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.store.rope_parameters import KNOWN_SCALINGS, rope, scaling_kind

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128},
}


def obstacle(config: dict[str, Any]) -> str:
    """`field value` of what the native model does not compute; "" when it computes this configuration."""
    kind = config.get("model_type")
    if kind not in _DEFAULTS:
        return f"model_type {kind!r}"
    config = _DEFAULTS[kind] | config
    for name, wanted in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if config.get(name, wanted) != wanted:
            return f"{name} {config[name]!r}"
    if scaling_kind(config) not in KNOWN_SCALINGS:
        return f"rope_type {scaling_kind(config)!r}"
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return ""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if kind != "llama" and isinstance(window, int) and isinstance(context, int) and window < context:
        return f"sliding_window {window!r}"
    return ""


def describe_native(
    folder: Path, config: dict[str, Any], digest: str, default_id: str, eos_token_ids: tuple[int, ...]
) -> ModelDescription:
    """Of a config without an obstacle. Raises ConfigurationError for numbers that are none."""
    kind = config["model_type"]
    config = _DEFAULTS[kind] | config

    def number(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or value <= 0:
            raise ConfigurationError(f"{folder}/config.json: {name} must be a positive number, not {value!r}")
        return value

    num_heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    all_biased = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
    context_length = number("max_position_embeddings")
    rope_theta, rope_scaling = rope(folder, config)
    return ModelDescription(
        folder="",
        weights=str(folder),
        architecture=kind,
        digest=digest,
        vocab_size=number("vocab_size"),
        context_length=context_length,
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.get("bos_token_id"),
        default_id=default_id,
        query_key_value_bias=all_biased or kind == "qwen2",
        attention_output_bias=all_biased,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
        query_key_norm=kind == "qwen3",
    )
