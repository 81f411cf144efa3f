"""The default model, loaded once for all tests of the runner, and tiny random models made by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.messages.model import ModelDescription
from runner.model_runner import ModelRunner
from runner.store.store import resolve

NUM_BLOCKS, BLOCK_SIZE = 640, 16
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With operations this small a second one only costs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """Makes transformers' model of a configuration, with random weights, and its folder as transformers saves it."""
    from transformers import AutoModelForCausalLM

    def make(configuration: Any, max_shard_size: str = "1GB") -> tuple[Any, Path]:
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(configuration).eval()
        # What begins as ones or zeros would hide a wrong order.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        write_tokenizer(folder, configuration.vocab_size)
        return model, folder

    return make


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token n is the word "tn"."""
    vocabulary = {f"t{index}": index for index in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[..., tuple[Any, Path]]) -> Callable[..., tuple[Any, Path]]:
    """A llama of two layers with random weights."""
    from transformers import LlamaConfig

    def make(max_shard_size: str = "1GB", **settings: Any) -> tuple[Any, Path]:
        return tiny_folder(LlamaConfig(**(TINY | settings)), max_shard_size)

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
