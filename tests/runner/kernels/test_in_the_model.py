"""The native kernels inside a model: bfloat16 text is the same whatever the chunks and the company.

That is a promise of our own products only; with oneDNN's the last bit of a row depends on how many rows there are.
Those of quantised weights are our own on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages.request import SamplingParams
from runner.kernels.cpu.backend import CpuKernels
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from tests.runner.harness import Harness
from tests.runner.quantized_files import Kind, write_llama

PROMPTS = [np.random.default_rng(seed).integers(0, 320, 10 + 37 * seed).tolist() for seed in range(5)]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)], ids=["greedy", "drawn"]
)
def test_bfloat16_text_does_not_depend_on_chunks_or_company(
    sampling: SamplingParams,
    kv_dtype: str,
    native: CpuKernels,
    tiny_model: Callable[..., tuple[Any, Path]],
    tmp_path: Path,
) -> None:
    description = resolve(str(tiny_model()[1]), tmp_path)
    runner = ModelRunner(
        description, device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, num_blocks=120, block_size=16, threads=0
    )
    harness = Harness(runner, 120, 16)
    together = harness.run(PROMPTS, 30, sampling=[sampling] * 5)
    assert len({tuple(text) for text in together}) == 5
    for chunk, concurrency in ((1, 1), (7, 3), (50, 1)):
        got = harness.run(PROMPTS, 30, chunk=chunk, concurrency=concurrency, sampling=[sampling] * 5)
        if native.has_own_products:
            assert got == together, (chunk, concurrency)


def test_heads_too_large_for_the_kernels_are_left_to_torch(
    native: CpuKernels, tiny_model: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    """Of 320 dimensions; the kernels take up to 256. Greedy text in float32 as transformers has it."""
    model, folder = tiny_model(head_dim=320)
    runner = ModelRunner(
        resolve(str(folder), tmp_path), device="cpu", dtype="float32", num_blocks=20, block_size=16, threads=0
    )
    prompt = torch.tensor([PROMPTS[1]])
    expected = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert Harness(runner, 20, 16).run([PROMPTS[1]], 12) == [expected.tolist()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_on_stored_weights_does_not_depend_on_chunks_or_company(
    dtype: str, native: CpuKernels, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "mixed.gguf", Kind.Q4_1, {"attn_v": Kind.Q6_K, "token_embd": Kind.Q8_0})
    description = resolve(str(path), tmp_path)
    runner = ModelRunner(
        description, device="cpu", dtype=dtype, num_blocks=120, block_size=16, threads=0, weights="stored"
    )
    harness = Harness(runner, 120, 16)
    prompts = [[token % 304 for token in prompt] for prompt in PROMPTS]
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5)]
    together = harness.run(prompts, 20, sampling=sampling)
    assert len({tuple(text) for text in together}) == 5
    for chunk, concurrency in ((1, 1), (7, 3), (50, 1)):
        got = harness.run(prompts, 20, chunk=chunk, concurrency=concurrency, sampling=sampling)
        assert got == together, (chunk, concurrency)
