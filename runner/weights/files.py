"""Which source reads which weights."""

from __future__ import annotations

from pathlib import Path

from actors.messages.model import ModelDescription
from runner.device import Device
from runner.weights.gguf_source import GGUFSource
from runner.weights.safetensors_source import SafetensorsSource
from runner.weights.source import WeightSource


def open_weights(description: ModelDescription, device: Device, stored: bool) -> WeightSource:
    """`stored`: quantised matrices as the file holds them.

    Raises ConfigurationError for weights that are missing, damaged or cut short.
    """
    if Path(description.weights).is_dir():
        return SafetensorsSource(description, device, stored)
    return GGUFSource(description, device, stored)
