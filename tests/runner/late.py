"""A CPU that behaves like a device which answers late: no copy has arrived before somebody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runner.device import Device, HostCopy


class LateEvent:
    def __init__(self) -> None:
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_host(self: Device, tensor: torch.Tensor) -> HostCopy:
        event: Any = LateEvent()
        return HostCopy(tensor, event)

    monkeypatch.setattr(Device, "to_host", to_host)


class Poison:
    """While it is on, the host is told token 0 whatever was sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        honest = Device.to_host

        def to_host(device: Device, tensor: torch.Tensor) -> HostCopy:
            return honest(device, torch.from_numpy(np.zeros(len(tensor), np.int32)) if self.on else tensor)

        monkeypatch.setattr(Device, "to_host", to_host)
