"""The length of a sequence that an engine accepts: asked for, or the model's own."""

from __future__ import annotations

import pytest

from actors.configuration import EngineConfiguration
from actors.engine import context_limit
from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription

CONTEXT = 8192


@pytest.fixture
def description() -> ModelDescription:
    return ModelDescription(
        folder="",
        weights="",
        architecture="llama",
        digest="",
        vocab_size=8,
        context_length=CONTEXT,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=2,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )


@pytest.mark.parametrize(("asked", "limit"), [(0, CONTEXT), (2, 2), (CONTEXT, CONTEXT)])
def test_the_limit(asked: int, limit: int, description: ModelDescription) -> None:
    assert context_limit(EngineConfiguration(max_model_len=asked), description) == limit


@pytest.mark.parametrize("asked", [1, CONTEXT + 1])
def test_a_limit_that_cannot_work(asked: int, description: ModelDescription) -> None:
    """1: one token of prompt leaves no room for an answer."""
    with pytest.raises(ConfigurationError, match=f"--max-model-len {asked} "):
        context_limit(EngineConfiguration(max_model_len=asked), description)
