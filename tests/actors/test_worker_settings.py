"""What the engine process decides reaches its worker."""

from __future__ import annotations

import msgspec

from actors.configuration import EngineConfiguration
from actors.engine import worker_settings
from actors.messages.model import ModelDescription
from actors.worker_settings import WorkerSettings


def test_the_weights_travel_as_json(default_model: ModelDescription) -> None:
    """That is how a worker gets its settings; without the flag they are dense."""
    stored = EngineConfiguration(engine_id="decode-0", weights="stored")
    settings = msgspec.json.decode(msgspec.json.encode(worker_settings(stored, default_model, 10)), type=WorkerSettings)
    assert (settings.weights, settings.dtype, settings.num_blocks) == ("stored", "bfloat16", 11)
    assert worker_settings(EngineConfiguration(engine_id="decode-0"), default_model, 10).weights == "dense"
