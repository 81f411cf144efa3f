"""The last sampled token of each request, on the device: what the next step computes, whether the host knows it or not.

int64 [slots]; who owns which slot is in requests.py. Reads and writes are queued on the device in the order of the
steps, so a slot may have a new owner while a step of its old one is still under way.
"""

from __future__ import annotations

import torch

from runner.batch import Batch
from runner.device import Device

_FIRST_SLOTS = 64


class LastTokens:
    def __init__(self, device: Device) -> None:
        self._tokens = torch.zeros(_FIRST_SLOTS, dtype=torch.int64, device=device.torch)

    def make_room(self, num_slots: int) -> None:
        have = len(self._tokens)
        if num_slots > have:
            grown = self._tokens.new_zeros(max(num_slots, 2 * have))
            grown[:have] = self._tokens
            self._tokens = grown

    def fill_in(self, batch: Batch) -> None:
        """Completes the batch's input."""
        if len(batch.slots):
            batch.token_ids.index_copy_(0, batch.slot_tokens, self._tokens.index_select(0, batch.slots))

    def keep(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """token_ids int64 [sampling rows], just sampled."""
        self._tokens.index_copy_(0, batch.sampling_slots, token_ids)
