"""`--weights stored`: the five formats bit by bit, models of each of them, and the default model as its file has it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from actors.messages.model import ModelDescription
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from runner.weights.quantized import joined, quantized
from tests.runner.quantized_files import STORED, VOCABULARY, Kind, random_blocks, write_llama
from tools.perplexity import perplexity, plan_of

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "data" / "alice.txt"
PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()
every_kind = pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)


@every_kind
def test_a_format_is_read_exactly(kind: Kind) -> None:
    """Against the gguf package, on random bits: every code, every scale of six bits, negative ones too."""
    raw = random_blocks(kind, 24, 512, np.random.default_rng(2))
    matrix = quantized(raw.reshape(-1), (24, 512), kind)
    assert matrix is not None
    assert matrix.shape == (24, 512)
    assert np.array_equal(matrix.dequantized().numpy(), gguf.quants.dequantize(raw, kind))
    assert matrix.fits_float16
    below = quantized(raw[:8].reshape(-1), (8, 512), kind)
    assert below is not None
    assert torch.equal(joined([matrix, below]).dequantized()[24:], matrix.dequantized()[:8])


def test_what_is_not_computed_on_as_stored() -> None:
    raw = random_blocks(Kind.Q5_K, 4, 256, np.random.default_rng(2))
    assert quantized(raw.reshape(-1), (4, 256), Kind.Q5_K) is None
    assert quantized(raw.reshape(-1)[:34], (32,), Kind.Q8_0) is None


def test_scales_that_float16_does_not_hold() -> None:
    """Q6_K's scale is a float16 times up to 128: 1,000 times that is beyond 65,504."""
    raw = random_blocks(Kind.Q6_K, 4, 256, np.random.default_rng(2))
    raw[:, 192:208] = 127
    raw[1, 208:210] = np.array([1000], np.float16).view(np.uint8)
    matrix = quantized(raw.reshape(-1), (4, 256), Kind.Q6_K)
    assert matrix is not None
    assert not matrix.fits_float16


def runner_of(path: Path, tmp_path: Path, weights: str, dtype: str = "float32") -> ModelRunner:
    description = resolve(str(path), tmp_path / "cache")
    return ModelRunner(
        description, device="cpu", dtype=dtype, num_blocks=120, block_size=16, threads=0, weights=weights
    )


def logits(runner: ModelRunner) -> torch.Tensor:
    """Of every token of the prompt."""
    return runner.score(plan_of(np.array(PROMPT, np.int32), 0, len(PROMPT)))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@every_kind
def test_a_model_of_each_format(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Logits against those of the dequantised weights in float32.

    An activation is off by at most 1/254 of its group's largest, for normal ones 0.6 % of their own size in the mean;
    14 products in a row, each 0.6 % off at random, give 2.2 %. A wrong scale or a wrong order of rows gives 100 %.
    """
    path = write_llama(tmp_path / "tiny.gguf", kind)
    dense = logits(runner_of(path, tmp_path, "dense"))
    stored = logits(runner_of(path, tmp_path, "stored"))
    assert relative_error(stored, dense) < 0.04
    assert relative_error(stored, dense) > 1e-4  # it is not the dense model that answered
    assert relative_error(logits(runner_of(path, tmp_path, "stored", "bfloat16")), dense) < 0.05
    # Plain torch computes the same: only sums and functions differ in their last bits, and then some roundings.
    monkeypatch.setenv("KVYARD_KERNELS", "torch")
    assert relative_error(logits(runner_of(path, tmp_path, "stored")), stored) < 0.01


MIXED = {"attn_v": Kind.Q6_K, "ffn_up": Kind.F16, "ffn_down": Kind.Q5_K, "ffn_gate": Kind.Q4_0, "output": Kind.Q8_0}


def test_kinds_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture, one_thread: None) -> None:
    """Query and key are one product, the value is another; what is not computed on as stored is dense; all are told."""
    path = write_llama(tmp_path / "mixed.gguf", Kind.Q4_K, MIXED, tied=False)
    dense = logits(runner_of(path, tmp_path, "dense"))
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "runner.weights.source"):
        stored = logits(runner_of(path, tmp_path, "stored"))
    assert relative_error(stored, dense) < 0.04
    assert caplog.messages == ["matrices as stored: 12 (7 Q4_K, 2 Q6_K, 2 Q4_0, 1 Q8_0); dense: 4 (2 F16, 2 Q5_K)"]


def test_a_folder_is_dense(
    tiny_model: Callable[..., tuple[Any, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model()[1]
    with caplog.at_level(logging.INFO, "runner.weights.source"):
        runner_of(folder, tmp_path, "stored")
    assert caplog.messages == ["matrices as stored: 0; dense: 16 (16 F32)"]


def test_perplexity_of_the_default_model(description: ModelDescription, float32_runner: ModelRunner) -> None:
    """Activations as whole numbers on Q4_1 and Q8_0 cost 0.8 % on a whole text (docs/benchmarks.md), here up to 1.5."""
    tokens = Tokenizer.from_file(f"{description.folder}/tokenizer.json").encode(TEXT.read_text()).ids[:513]
    exact = perplexity(float32_runner, tokens)
    stored = ModelRunner(
        description, device="cpu", dtype="bfloat16", num_blocks=40, block_size=16, threads=0, weights="stored"
    )
    assert 15 < exact < 30
    assert abs(perplexity(stored, tokens) / exact - 1) < 0.015


LOADED = """
from pathlib import Path
from runner.device import Device
from runner.kernels.registry import choose
from runner.model_runner import ModelRunner
from runner.store.store import resolve

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024

choose(Device("cpu", "bfloat16", 0))
description = resolve("smollm2-135m-instruct")
before = resident()
runner = ModelRunner(
    description, device="cpu", dtype="bfloat16", num_blocks=2, block_size=16, threads=0, weights="stored"
)
print(resident() - before, Path(description.weights).stat().st_size)
"""


def test_stored_weights_take_the_memory_of_their_file() -> None:
    """Once: the embedding is the head, and of the file itself nothing stays. Dense bfloat16 takes 2.9 times as much.

    The tokenizer's part of the file, 2 MB, is not loaded; norms, angles and the allocator's leftovers are.
    """
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, cwd=ROOT, check=True)
    taken, file_size = map(int, result.stdout.split())
    assert 0.9 < taken / file_size < 1.25
