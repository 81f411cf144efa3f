"""Which kernels a device gets: those of its backend, or plain torch where there is no backend or it cannot be had.

A backend is a folder with a module `backend` that offers `load(device) -> Kernels` and raises BackendUnavailable with
what would help; to add one for another device is to add its folder and a line here.
"""

from __future__ import annotations

import importlib
import logging
import os

from actors.messages.errors import ConfigurationError
from runner.device import Device
from runner.kernels.errors import BackendUnavailable
from runner.kernels.kernels import Kernels
from runner.kernels.torch_kernels import TorchKernels

_BACKENDS = {"cpu": "runner.kernels.cpu.backend"}  # by torch's device type
_CHOICES = ("auto", "torch")

logger = logging.getLogger(__name__)


def choose(device: Device) -> Kernels:
    """$KVYARD_KERNELS `torch` asks for plain torch; `auto`, the default, for the best there is.

    Says in one line of the log when that is not the device's backend. Raises ConfigurationError for another value.
    """
    wanted = os.environ.get("KVYARD_KERNELS") or "auto"
    if wanted not in _CHOICES:
        raise ConfigurationError(f"KVYARD_KERNELS={wanted!r} is unknown; kvyard knows {', '.join(_CHOICES)}")
    backend = _BACKENDS.get(device.torch.type)
    if backend is None or wanted == "torch":
        return TorchKernels(device)
    try:
        kernels: Kernels = importlib.import_module(backend).load(device)
    except BackendUnavailable as error:
        logger.warning("no %s kernels, so plain torch computes, which is slower: %s", device.torch.type, error)
        return TorchKernels(device)
    return kernels
