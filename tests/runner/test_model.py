"""The llama model against HF transformers in float32 on tiny random models: logits, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from tests.runner.harness import Harness, int32

pytestmark = pytest.mark.usefixtures("one_thread")

TinyModel = Callable[..., tuple[Any, Path]]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SETTINGS = {
    "grouped-tied": {"tie_word_embeddings": True},
    "every-head-its-own-llama3": {"num_key_value_heads": 4, "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "one-kv-head-linear": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-3,
    },
    "sharded": {"max_shard_size": "50KB", "vocab_size": 500},
}
PROMPT = np.random.default_rng(1).integers(0, 320, 90).tolist()


def make_runner(folder: Path, cache: Path, dtype: str = "float32") -> ModelRunner:
    return ModelRunner(resolve(str(folder), cache), device="cpu", dtype=dtype, num_blocks=40, block_size=16, threads=1)


def logits(runner: ModelRunner, prompt: list[int], ends: list[int], table: list[int]) -> list[torch.Tensor]:
    """The logits behind each of `ends`, computed in chunks that end there."""
    found, start = [], 0
    for end in ends:
        new = NewRequest("r", int32(prompt), len(prompt), SamplingParams())
        plan = StepPlan(
            step=0,
            request_ids=("r",),
            num_scheduled_tokens=int32([end - start]),
            num_computed_tokens=int32([start]),
            num_sampled=int32([1]),
            num_new_blocks=int32([0 if start else len(table)]),
            new_block_ids=int32([] if start else table),
            new_requests=() if start else (new,),
        )
        computation = runner.compute(plan)
        assert computation is not None
        found.append(computation[1][0])
        start = end
    return found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits_equal_transformers(settings: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    model, folder = tiny_model(**settings)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("max_shard_size" in settings)
    runner = make_runner(folder, tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    # A prefill, a chunk behind it, single tokens on both sides of a block's edge, and a long chunk.
    ends = [30, 47, 48, 49, 90]
    for end, got in zip(ends, logits(runner, PROMPT, ends, [9, 3, 30, 4, 21, 7]), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected[end - 1], atol=2e-4, rtol=1e-4)


def test_keys_and_values_lie_in_the_pool_as_the_layout_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    """[block, kv head, layer, key or value, token in block, dimension]; keys are turned already, as HF caches them."""
    model, folder = tiny_model()
    runner, table = make_runner(folder, tmp_path), [9, 3, 30, 4, 21, 7]
    logits(runner, PROMPT, [40, 41, 90], table)
    with torch.inference_mode():
        cache = model(torch.tensor([PROMPT]), use_cache=True).past_key_values
    pool = runner.kv_pool.tensor
    assert pool.shape == (40, 2, 2, 2, 16, 16)
    for token in (0, 15, 16, 40, 89):
        for layer in range(2):
            stored = pool[table[token // 16], :, layer, :, token % 16]
            expected = torch.stack((cache.layers[layer].keys[0, :, token], cache.layers[layer].values[0, :, token]), 1)
            torch.testing.assert_close(stored, expected, atol=1e-4, rtol=1e-4)
    # Tokens 90 to 95 of the last block, and every block of nobody's.
    assert not pool[7, :, :, :, 10:].any()
    assert not pool[[0, 1, 2, 39]].any()


def test_the_pool_is_one_aligned_span(tiny_model: TinyModel, tmp_path: Path) -> None:
    runner = make_runner(tiny_model()[1], tmp_path, "bfloat16")
    pool = runner.kv_pool
    assert pool.block_bytes == 2 * 2 * 2 * 16 * 16 * 2
    assert pool.num_bytes == 40 * pool.block_bytes == len(pool.memory())
    assert pool.address % 4096 == 0
    assert pool.tensor.is_contiguous()
    pool.memory()[3 * pool.block_bytes : 3 * pool.block_bytes + 2] = torch.tensor([1.5], dtype=torch.bfloat16).view(
        torch.uint8
    ).numpy().tobytes()  # fmt: skip
    assert pool.tensor[3, 0, 0, 0, 0, 0].item() == 1.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lay_in_a_block_before_does_not_matter(dtype: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Freed blocks may hold anything, such as a corrupted transfer's NaN."""
    runner = make_runner(tiny_model(tie_word_embeddings=False)[1], tmp_path, dtype)
    harness = Harness(runner, 40, 16)
    clean = harness.run([PROMPT, PROMPT[:20]], 12, chunk=25)
    runner.kv_pool.tensor[1:].fill_(torch.nan)
    assert harness.run([PROMPT, PROMPT[:20]], 12, chunk=25) == clean


def test_blocks_computed_elsewhere_are_kept(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A request may start behind blocks that another request, or a transfer, has filled."""
    _, folder = tiny_model()
    first, second = make_runner(folder, tmp_path), make_runner(folder, tmp_path)
    expected = logits(first, PROMPT, [64, 90], [1, 2, 3, 4, 5, 6])[-1]
    second.kv_pool.tensor[20:24] = first.kv_pool.tensor[1:5]
    new = NewRequest("r", int32(PROMPT), len(PROMPT), SamplingParams())
    plan = StepPlan(
        step=0,
        request_ids=("r",),
        num_scheduled_tokens=int32([26]),
        num_computed_tokens=int32([64]),
        num_sampled=int32([1]),
        num_new_blocks=int32([6]),
        new_block_ids=int32([20, 21, 22, 23, 8, 9]),
        new_requests=(new,),
    )
    computation = second.compute(plan)
    assert computation is not None
    torch.testing.assert_close(computation[1][0], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(second.kv_pool.tensor[20:24], first.kv_pool.tensor[1:5])


def test_warm_up_leaves_no_trace(tiny_model: TinyModel, tmp_path: Path) -> None:
    runner = make_runner(tiny_model(max_position_embeddings=40)[1], tmp_path)
    runner.warm_up()
    assert not runner.kv_pool.tensor.any()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_scheduled_tokens": int32([33])}, "33, but 32 are known"),
        ({"new_block_ids": int32([1]), "num_new_blocks": int32([1])}, "its blocks hold 16"),
        ({"num_sampled": int32([2])}, "num_sampled=2"),
        ({"num_sampled": int32([1, 1])}, "differ in length"),
    ],
)
def test_a_plan_that_cannot_be_raises(
    changed: dict[str, Any], said: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    runner = make_runner(tiny_model()[1], tmp_path)
    plan: dict[str, Any] = {
        "step": 4,
        "request_ids": ("r",),
        "num_scheduled_tokens": int32([32]),
        "num_computed_tokens": int32([0]),
        "num_sampled": int32([1]),
        "num_new_blocks": int32([3]),
        "new_block_ids": int32([1, 2, 3]),
        "new_requests": (NewRequest("r", int32(PROMPT[:32]), 32, SamplingParams()),),
    }
    with pytest.raises(ValueError, match=said):
        runner.launch(StepPlan(**(plan | changed)))
