"""SmolLM2 in float32 says what HF transformers says, token for token, however its tokens are chunked and batched.

The expected tokens are HF's on the same GGUF weights: tests/references/make_references.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.messages.model import ModelDescription
from actors.messages.request import SamplingParams
from runner.device import Device
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from runner.weights.gguf_source import GGUFSource
from runner.weights.source import expected_shapes
from tests.runner.conftest import BLOCK_SIZE, NUM_BLOCKS, REFERENCES
from tests.runner.harness import Harness

References = list[dict[str, Any]]


@pytest.fixture
def harness(float32_runner: ModelRunner) -> Harness:
    return Harness(float32_runner, NUM_BLOCKS, BLOCK_SIZE)


def test_the_references_are_of_these_weights(description: ModelDescription, references: References) -> None:
    assert json.loads(REFERENCES.read_text())["model_digest"] == description.digest
    assert [len(entry["output_token_ids"]) for entry in references] == [64] * 20
    lengths = sorted(len(entry["prompt_token_ids"]) for entry in references)
    assert (lengths[0], lengths[-1]) == (5, 1500)


def test_all_prompts_together(harness: Harness, references: References) -> None:
    """Decodes of very different context lengths share their steps with prefills in chunks."""
    got = harness.run([entry["prompt_token_ids"] for entry in references], 64, chunk=300, concurrency=16)
    assert got == [entry["output_token_ids"] for entry in references]


@pytest.mark.parametrize(("chunk", "concurrency"), [(1, 3), (7, 1), (16, 5), (100, 2)])
def test_chunking_and_batching(harness: Harness, references: References, chunk: int, concurrency: int) -> None:
    chosen = [entry for entry in references if len(entry["prompt_token_ids"]) <= 20]
    got = harness.run([entry["prompt_token_ids"] for entry in chosen], 24, chunk=chunk, concurrency=concurrency)
    assert got == [entry["output_token_ids"][:24] for entry in chosen]


def test_preemption(harness: Harness, references: References) -> None:
    """A request that loses its blocks is computed again, its output so far included, in other blocks."""
    entry = next(entry for entry in references if len(entry["prompt_token_ids"]) == 100)
    request = harness.add("r", entry["prompt_token_ids"])
    for _ in range(3):
        for _ in range(7):
            harness.step([(request, len(request.tokens) - request.num_computed)])
        harness.preempt(request)
    assert request.output == entry["output_token_ids"][:21]


def test_seeded_text_does_not_depend_on_chunks_or_company(harness: Harness, references: References) -> None:
    chosen = [entry["prompt_token_ids"] for entry in references if len(entry["prompt_token_ids"]) <= 50]
    sampling = [
        SamplingParams(temperature=0.9, seed=index, top_k=(-1, 50)[index % 2], top_p=(1.0, 0.9)[index // 2 % 2])
        for index in range(len(chosen))
    ]
    together = harness.run(chosen, 16, sampling=sampling)
    assert harness.run(chosen, 16, chunk=9, concurrency=3, sampling=sampling) == together
    greedy = harness.run(chosen, 16)
    assert sum(one != other for one, other in zip(together, greedy, strict=True)) > len(chosen) // 2


def test_the_same_weights_from_a_sharded_folder(
    description: ModelDescription, references: References, tmp_path: Path
) -> None:
    folder = tmp_path / "SmolLM2"
    hugging_face_folder(description, folder)
    resolved = resolve(str(folder), tmp_path / "cache")
    assert (resolved.default_id, resolved.eos_token_ids, resolved.tie_word_embeddings) == ("SmolLM2", (2,), True)
    runner = ModelRunner(resolved, device="cpu", dtype="float32", num_blocks=100, block_size=16, threads=0)
    chosen = references[:3]
    got = Harness(runner, 100, 16).run([entry["prompt_token_ids"] for entry in chosen], 16)
    assert got == [entry["output_token_ids"][:16] for entry in chosen]


def hugging_face_folder(description: ModelDescription, folder: Path) -> None:
    """Three shards with an index, as users have their models."""
    folder.mkdir()
    source = GGUFSource(description, Device("cpu", "float32", 0), stored=False)
    names = [name for name in expected_shapes(description) if name != "lm_head.weight"]
    index: dict[str, str] = {}
    for shard in range(3):
        file_name = f"model-{shard + 1:05d}-of-00003.safetensors"
        save_file({name: source.take(name) for name in names[shard::3]}, folder / file_name)
        index |= dict.fromkeys(names[shard::3], file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "tokenizer.json").write_bytes((Path(description.folder) / "tokenizer.json").read_bytes())


def test_bfloat16_computes_the_same_model(description: ModelDescription, references: References) -> None:
    """Teacher-forced on the float32 text: rounding to 8 bits moves few of the best tokens."""
    runner = ModelRunner(description, device="cpu", dtype="bfloat16", num_blocks=100, block_size=16, threads=0)
    harness, agreed, total = Harness(runner, 100, 16), 0, 0
    for entry in references[:6]:
        prompt, text = entry["prompt_token_ids"], entry["output_token_ids"]
        request = harness.add(entry["name"], prompt)
        for position, token_id in enumerate(text):
            harness.step([(request, len(request.tokens) - request.num_computed)])
            agreed += request.output[position] == token_id
            total += 1
            # The next step is computed from the reference's token: the request is told again what it is.
            request.tokens[-1], request.known = token_id, False
        harness.finish(request)
    assert runner.kv_pool.tensor.dtype is torch.bfloat16
    assert agreed / total > 0.95
