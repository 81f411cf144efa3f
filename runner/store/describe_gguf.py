"""A GGUF header → ModelDescription and tokenizer files. Says clearly what kvyard does not run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.store.tokenizer import byte_level_tokenizer
from runner.weights.gguf_header import GGUFHeader

_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def describe_gguf(header: GGUFHeader, digest: str, default_id: str) -> ModelDescription:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    experts = metadata.get(f"{architecture}.expert_count", 0)
    if architecture not in _ARCHITECTURES or experts:
        raise ConfigurationError(
            f"{header.path} has architecture {architecture!r}{' with experts' if experts else ''}; "
            f"kvyard runs GGUF files of {', '.join(_ARCHITECTURES)} without experts"
        )

    def value(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    hidden_size, num_heads = _int(header, "embedding_length"), _int(header, "attention.head_count")
    head_size = int(value("attention.key_length", hidden_size // num_heads))
    rotated = int(value("rope.dimension_count", head_size))
    if rotated != head_size:
        raise ConfigurationError(f"{header.path} rotates {rotated} of {head_size} dimensions; kvyard rotates all")
    window, context_length = int(value("attention.sliding_window", 0)), _int(header, "context_length")
    if 0 < window < context_length:
        raise ConfigurationError(
            f"{header.path} has {architecture}.attention.sliding_window {window} within a context of {context_length}; "
            "kvyard runs sliding windows from Hugging Face folders only"
        )
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelDescription(
        folder="",
        weights=header.path,
        architecture=architecture,
        digest=digest,
        vocab_size=_embedding_rows(header),
        context_length=context_length,
        hidden_size=hidden_size,
        intermediate_size=_int(header, "feed_forward_length"),
        num_layers=_int(header, "block_count"),
        num_heads=num_heads,
        num_kv_heads=int(value("attention.head_count_kv", num_heads)),
        head_size=head_size,
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(value("rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(header, architecture),
        tie_word_embeddings="output.weight" not in header.tensors,
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        default_id=default_id,
        query_key_value_bias="blk.0.attn_q.bias" in header.tensors,
        attention_output_bias="blk.0.attn_output.bias" in header.tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in header.tensors,
    )


def tokenizer_files(header: GGUFHeader) -> dict[str, str]:
    """File name → content of what the description's folder needs beside description.json."""
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigurationError(
            f"{header.path} carries a {kind!r} tokenizer; kvyard converts byte-level BPE ('gpt2'). "
            "Give --model the model's Hugging Face folder with its tokenizer.json instead"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))
    tokenizer = byte_level_tokenizer(
        source=header.path,
        tokens=_list(header, "tokenizer.ggml.tokens"),
        token_types=_list(header, "tokenizer.ggml.token_type"),
        merges=_list(header, "tokenizer.ggml.merges"),
        pre=pre,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
    )
    files = {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False)}
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template
    return files


def _int(header: GGUFHeader, name: str) -> int:
    key = f"{header.metadata['general.architecture']}.{name}"
    value = header.metadata.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{header.path} lacks {key}, or it is not a positive number: {value!r}")
    return value


def _list(header: GGUFHeader, key: str) -> list[Any]:
    value = header.metadata.get(key)
    if not isinstance(value, list):
        raise ConfigurationError(f"{header.path} lacks {key}: it holds no complete tokenizer")
    return value


def _embedding_rows(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigurationError(f"{header.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _rope_scaling(header: GGUFHeader, architecture: str) -> str:
    """Canonical JSON. Llama 3 files carry their scaling as one factor per frequency in a tensor."""
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        with open(header.path, "rb") as handle:
            handle.seek(factors.offset)
            values = np.frombuffer(handle.read(factors.num_bytes), np.float32).tolist()
        return json.dumps({"factors": values, "rope_type": "factors"}, sort_keys=True)
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return ""
    if kind == "linear":
        factor = float(header.metadata.get(f"{architecture}.rope.scaling.factor", 1.0))
        return json.dumps({"factor": factor, "rope_type": "linear"}, sort_keys=True)
    raise ConfigurationError(f"{header.path} scales its positions by {kind!r}; kvyard knows none, linear and llama3")
