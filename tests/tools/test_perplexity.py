"""The perplexity of a text is transformers' own, whatever the chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tools.perplexity
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from tests.runner.conftest import TINY, write_tokenizer
from tools.perplexity import BLOCK_SIZE, main, num_blocks_for, perplexity


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("tiny")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, TINY["vocab_size"])
    return model, folder


def test_it_is_transformers_own(
    tiny: tuple[torch.nn.Module, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = tiny
    tokens = np.random.default_rng(0).integers(0, TINY["vocab_size"], 100)
    ids = torch.from_numpy(tokens)[None]
    with torch.inference_mode():
        expected = float(model(ids, labels=ids).loss.exp())
    for chunk in (256, 7, 99, 1):
        monkeypatch.setattr(tools.perplexity, "_CHUNK", chunk)
        runner = ModelRunner(
            resolve(str(folder), tmp_path),
            device="cpu",
            dtype="float32",
            num_blocks=num_blocks_for(100),
            block_size=BLOCK_SIZE,
            threads=1,
        )
        assert perplexity(runner, tokens.tolist()) == pytest.approx(expected, rel=1e-5)


def test_a_text_without_a_second_token(
    tiny: tuple[torch.nn.Module, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVYARD_CACHE", str(tmp_path))
    text = tmp_path / "text"
    text.write_text("t5")
    result = CliRunner().invoke(main, [str(tiny[1]), "--text", str(text)])
    assert result.exit_code == 1
    assert result.output == f"Error: {text} has fewer than two tokens\n"
