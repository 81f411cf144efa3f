"""What everyone needs to know of a model without touching its weights."""

from __future__ import annotations

import msgspec

from actors.messages.lease import KVLayout


class ModelDescription(msgspec.Struct, frozen=True):
    """Made by the model store. `folder` holds tokenizer.json, chat_template.jinja (or none), description.json."""

    folder: str
    weights: str  # path of the .gguf file, or of the folder with the safetensors
    architecture: str  # "llama", "mistral", "qwen2", "qwen3", or any `model_type` of transformers
    digest: str  # hex SHA-256: equal digests mean equal weights, and for a folder an equal config.json
    vocab_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: str = ""  # canonical JSON of HF's rope_scaling, "" for none
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_id: str = "model"  # the served name unless a flag says another
    modelling: str = "native"  # "transformers": its own code computes the model, see runner/transformers_model
    query_key_value_bias: bool = False  # the products that have one, with `modelling` "native"
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False  # RMSNorm of each query and key head before it is turned

    def kv_layout(self, dtype: str, block_size: int, kv_dtype: str = "auto") -> KVLayout:
        return KVLayout(
            model_digest=self.digest,
            dtype=dtype,
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            kv_dtype=kv_dtype,
        )
