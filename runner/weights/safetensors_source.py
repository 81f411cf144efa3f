"""Weights of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.device import Device
from runner.store.describe_folder import weight_files
from runner.weights.source import WeightSource

# Older checkpoints store what every model can compute.
_COMPUTED = "rotary_emb.inv_freq"


class SafetensorsSource(WeightSource):
    def __init__(self, description: ModelDescription, device: Device, stored: bool) -> None:
        files = weight_files(Path(description.weights))
        self._holder: dict[str, Any] = {}
        for path in files:
            handle: Any = safe_open(path, framework="pt")
            self._holder |= dict.fromkeys(handle.keys(), handle)
        super().__init__(description, device, [name for name in self._holder if not name.endswith(_COMPUTED)], stored)

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._holder[name].get_tensor(name)
        except SafetensorError as error:
            raise ConfigurationError(f"{self._path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def kind(self, name: str) -> str:
        return str(self._holder[name].get_slice(name).get_dtype())
