"""Any other decoder, through transformers' own code over the paged pool: the tokens are those of its `generate`.

The real scheduler core serves twelve requests at once: prefills in chunks, prefix hits, a pool too small for all, so
that requests are preempted and computed again. Greedy, float32, tiny random weights. Sliding windows are 24 tokens,
most requests are longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.messages.request import EngineRequest
from runner.model_runner import ModelRunner
from runner.store import describe_folder, through_transformers
from runner.store.store import resolve
from runner.transformers_model.examine import examine
from tests.runner.conftest import TINY
from tests.runner.test_ahead import BLOCK_SIZE, CONFIGURATION, USABLE_BLOCKS, serve

TinyFolder = Callable[..., tuple[Any, Path]]

WINDOW = {"sliding_window": 24}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    # Both caps bend the scores: without them they go to 30 and more.
    "gemma2": (
        "Gemma2",
        WINDOW
        | {"head_dim": 16, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 64},
    ),
    "gemma3": ("Gemma3Text", WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 3}),
    "gpt2": (
        "GPT2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "use_parallel_residual": True}),
    "gptj": ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.1, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "mistral, window": ("Mistral", WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3, window": ("Phi3", WINDOW),
    "qwen2, window in one layer": ("Qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "starcoder2, window": ("Starcoder2", WINDOW),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One import of transformers for all; the examiner's own process has a test of its own."""
    monkeypatch.setattr(through_transformers, "ask_transformers", lambda folder: examine(str(folder)))


def configuration(name: str, settings: dict[str, Any]) -> Any:
    import transformers

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, f"{name}Config")(**(TINY | tokens | settings))


def requests() -> list[EngineRequest]:
    """Prompts of 1 to 70 tokens, a third behind 30 common ones."""
    rng = random.Random(3)
    common = [rng.randrange(3, 320) for _ in range(30)]
    prompts = [
        (common if index % 3 == 0 else []) + [rng.randrange(3, 320) for _ in range(rng.choice((1, 5, 17, 40)))]
        for index in range(12)
    ]
    return [
        EngineRequest(f"r{index}", tuple(prompt), max_tokens=8 + index, arrival=float(index))
        for index, prompt in enumerate(prompts)
    ]


def generated(model: Any, request: EngineRequest) -> list[int]:
    """By transformers, with its own attention and cache."""
    prompt = torch.tensor([request.prompt_token_ids])
    model.generation_config.eos_token_id = None
    output = model.generate(prompt, do_sample=False, max_new_tokens=request.max_tokens, pad_token_id=0)
    return [int(token) for token in output[0, prompt.shape[1] :]]


def make_runner(folder: Path, cache: Path, num_blocks: int = USABLE_BLOCKS + 1) -> ModelRunner:
    description = resolve(str(folder), cache)
    assert description.modelling == "transformers"
    return ModelRunner(
        description, device="cpu", dtype="float32", num_blocks=num_blocks, block_size=BLOCK_SIZE, threads=1
    )


@pytest.mark.parametrize(("name", "settings"), MODELS.values(), ids=MODELS.keys())
def test_tokens_are_those_of_generate(
    name: str, settings: dict[str, Any], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model, folder = tiny_folder(configuration(name, settings))
    expected = {request.request_id: generated(model, request) for request in requests()}
    # Else a model that says the same whatever it sees would pass.
    assert len({tuple(tokens[:8]) for tokens in expected.values()}) >= 10
    done = serve(make_runner(folder, tmp_path), CONFIGURATION, requests(), 2)
    assert done.tokens == expected
    assert {name for name, times in done.seen.items() if times} >= {"preempted", "resumed", "chunk", "mixed", "hit"}


def test_warm_up_and_a_window_beyond_the_context(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """A window that no request outgrows is none, so what is beside it is served plainly."""
    model, folder = tiny_folder(configuration("Phi3", {"sliding_window": 256}))
    runner = make_runner(folder, tmp_path, 80)
    runner.warm_up()
    assert not runner.kv_pool.tensor.any()
    request = requests()[0]
    roomy = msgspec.structs.replace(CONFIGURATION, usable_blocks=79)
    assert serve(runner, roomy, [request], 1).tokens[request.request_id] == generated(model, request)


def test_the_sizes_are_those_of_the_model(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """GPT-2 names its sizes differently, and GPT-BigCode has one KV head that no field tells."""
    model, folder = tiny_folder(configuration(*MODELS["gpt_bigcode"]))
    description = resolve(str(folder), tmp_path)
    assert (description.architecture, description.vocab_size, description.context_length) == ("gpt_bigcode", 320, 256)
    assert (description.num_layers, description.num_heads, description.num_kv_heads, description.head_size) == (
        2,
        4,
        1,
        16,
    )
    assert describe_folder.computation(folder) != b"{}"
    assert model.config.n_head == 4
