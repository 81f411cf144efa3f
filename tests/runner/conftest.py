"""The default model, loaded once for all tests of the runner, and tiny random models made by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.messages.model import ModelDescription
from runner.model_runner import ModelRunner
from runner.store.store import resolve

NUM_BLOCKS, BLOCK_SIZE = 640, 16
REFERENCES = Path(__file__).parents[1] / "references" / "greedy.json"


@pytest.fixture(scope="session")
def description() -> ModelDescription:
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def float32_runner(description: ModelDescription) -> ModelRunner:
    return ModelRunner(
        description, device="cpu", dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, threads=0
    )


@pytest.fixture(scope="session")
def references() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(REFERENCES.read_text())["prompts"]
    return prompts


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """Makes a llama of two layers with random weights, and its folder as transformers saves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(max_shard_size: str = "1GB", **settings: Any) -> tuple[Any, Path]:
        torch.manual_seed(5)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(**(sizes | heads | {"max_position_embeddings": 256, "initializer_range": 0.2} | settings))
        model = LlamaForCausalLM(config).eval()
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        vocabulary = {f"t{index}": index for index in range(config.vocab_size)}
        tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary}}
        tokenizer["model"]["unk_token"] = "t0"  # type: ignore[index]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return model, folder

    return make


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A GGUF with one layer, 32 tokens and random numbers, written by the `gguf` package."""
    import gguf
    import numpy as np

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", *(chr(97 + index) for index in range(26)), "ab", "1", "2", "Ġ", "Ġa"])
    writer.add_token_types([3, *[1] * 31])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    generator = np.random.default_rng(3)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))

    add("token_embd", 32, 32)
    add("output_norm", 32)
    for name, *shape in (("attn_norm", 32), ("ffn_norm", 32), ("attn_q", 32, 32), ("attn_k", 16, 32)):
        add(f"blk.0.{name}", *shape)
    for name, *shape in (("attn_v", 16, 32), ("attn_output", 32, 32), ("ffn_gate", 64, 32), ("ffn_up", 64, 32)):
        add(f"blk.0.{name}", *shape)
    add("blk.0.ffn_down", 32, 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
