"""Llama, Mistral, Qwen2 and Qwen3 in our own model, against transformers in float32 on tiny random weights.

Every case says which configuration it is that the obvious wrong implementation gets wrong: a bias, a norm, a head size,
a scaling of the positions. Biases and norms are random here, so that leaving one out or mixing two up shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from actors.messages.errors import ConfigurationError
from runner.model.rope import inverse_frequencies, magnitude
from runner.store.store import resolve
from tests.runner.conftest import TINY
from tests.runner.harness import Harness
from tests.runner.test_model import PROMPT, logits, make_runner

pytestmark = pytest.mark.usefixtures("one_thread")

TinyFolder = Callable[..., tuple[Any, Path]]

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama, attention's only, heads of 24": ("Llama", {"attention_bias": True, "head_dim": 24}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mistral, window of the context, tied": ("Mistral", {"sliding_window": 256, "tie_word_embeddings": True}),
    "mistral, heads of 32": ("Mistral", {"head_dim": 32, "sliding_window": None, "rms_norm_eps": 1e-2}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, untied, yarn untruncated": ("Qwen2", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}}),
    "qwen2, window not used": ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    "qwen3, heads of 32": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3, all biases, tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, yarn with a factor of its own": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 0.7}},
    ),
}


def configuration(family: str, settings: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**(TINY | settings))


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES.keys())
def test_logits_equal_transformers(
    family: str, settings: dict[str, Any], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model, folder = tiny_folder(configuration(family, settings))
    runner = make_runner(folder, tmp_path)
    description = resolve(str(folder), tmp_path)
    assert (description.architecture, description.modelling) == (family.lower(), "native")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    ends = [30, 47, 48, 49, 90]
    for end, got in zip(ends, logits(runner, PROMPT, ends, [9, 3, 30, 4, 21, 7]), strict=True):
        torch.testing.assert_close(got, expected[end - 1], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_greedy_tokens_of_several_requests_at_once(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """In chunks of 13 tokens, so prefills, chunks and decodes share steps."""
    model, folder = tiny_folder(configuration(family, {"head_dim": 16, "sliding_window": None}))
    prompts = [PROMPT[:5], PROMPT[5:40], PROMPT[40:41], PROMPT[20:80]]
    model.generation_config.eos_token_id = None
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)[0, len(prompt) :]
        for prompt in prompts
    ]
    got = Harness(make_runner(folder, tmp_path), 40, 16).run(prompts, 12, chunk=13)
    assert got == [tokens.tolist() for tokens in expected]


def test_bfloat16_follows_float32(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """With biases, behind the prepacked products: within bfloat16's 8 bits of the largest logit."""
    _, folder = tiny_folder(configuration("Qwen2", {}))
    exact = logits(make_runner(folder, tmp_path), PROMPT, [40, 41], [9, 3, 30])
    rounded = logits(make_runner(folder, tmp_path, "bfloat16"), PROMPT, [40, 41], [9, 3, 30])
    for one, other in zip(exact, rounded, strict=True):
        assert (one - other).abs().max() < 0.05 * one.abs().max()


def test_yarn_by_hand() -> None:
    """head_size 8, theta 10,000, factor 4, original context 64, beta 32 and 1.

    Dimensions that turn 32 times and once in 64 tokens: 8·ln(64/64π)/(2·ln 10000) = -0.50 and 8·ln(64/2π)/(2·ln 10000)
    = 1.008; rounded outwards and clamped 0 and 2. So of the frequencies 1, 0.1, 0.01, 0.001 the first stays, the
    second is halfway between 0.1 and 0.025, the others are divided by 4. Magnitude: 0.1·ln 4 + 1.
    """
    scaling = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    text = json.dumps(scaling | {"original_max_position_embeddings": 64, "attention_factor": 1.1386})
    got = inverse_frequencies(8, 10_000.0, text)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0625, 0.0025, 0.00025]))
    assert magnitude(text) == 1.1386
    assert magnitude("") == magnitude('{"rope_type": "linear", "factor": 2}') == 1.0


def test_the_digest_covers_what_changes_keys(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Equal weights normed with another epsilon make other keys: two such engines must not pair."""
    _, folder = tiny_folder(configuration("Qwen3", {"head_dim": 16}))
    path, digests = folder / "config.json", []
    config = json.loads(path.read_text())
    for change in ({}, {"rms_norm_eps": 1e-5}, {"use_cache": False, "eos_token_id": 7, "transformers_version": "4"}):
        path.write_text(json.dumps(config | change))
        digests.append(resolve(str(folder), tmp_path).kv_layout("float32", 16).model_digest)
    assert digests[0] == digests[2] != digests[1]


def test_a_folder_that_lacks_its_biases(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    _, folder = tiny_folder(configuration("Llama", {}))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    with pytest.raises(ConfigurationError, match=r"lack the tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_runner(folder, tmp_path)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_gguf_file_equals_its_folder(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Written as llama.cpp's converter does: these families' rotary halves stay apart."""
    model, folder = tiny_folder(configuration(family, {"head_dim": 16, "rms_norm_eps": 1e-4}))
    path, architecture = tmp_path / "tiny.gguf", family.lower()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{index}" for index in range(320)])
    writer.add_token_types([1] * 320)
    writer.add_token_merges(["t 1"])
    for name, tensor in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        parts = stem.split(".")
        block = f"blk.{parts[2]}." if stem.startswith("model.layers.") else ""
        writer.add_tensor(f"{block}{GGUF_NAMES['.'.join(parts[3:]) if block else stem]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = logits(make_runner(folder, tmp_path), PROMPT, [50, 51], [9, 3, 30, 4])
    got = logits(make_runner(path, tmp_path), PROMPT, [50, 51], [9, 3, 30, 4])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_gguf_with_a_sliding_window(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    # Same length, so the file stays whole: the number of KV heads becomes a window of 1.
    key, other = b"llama.attention.head_count_kv", b"llama.attention.sliding_window"
    assert len(other) == len(key) + 1
    length = np.uint64(len(key)).tobytes()
    assert content.count(length + key) == 1
    renamed = content.replace(length + key, np.uint64(len(other)).tobytes() + other)
    tiny_gguf.write_bytes(renamed)
    with pytest.raises(ConfigurationError, match=r"llama\.attention\.sliding_window 1 within a context of 128"):
        resolve(str(tiny_gguf), tmp_path)
