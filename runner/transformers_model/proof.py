"""Proof at the start, on the real weights: packed and paged, the model says what its own code says of each text alone.

Serving several requests in one step rests on their tokens meeting nowhere but in the attention. No list of
architectures can promise that, two small steps show it. The second step continues the first out of the pool.

    step 1 | A0 A1 A2 A3 A4 | B0 B1 |      step 2 | B2 | A5 A6 A7 A8 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.attention.variants import VariantAttention
from runner.batch import Batch, BatchBuilder, Geometry
from runner.device import Device
from runner.kv_pool import KVPool
from runner.requests import RequestTable
from runner.transformers_model.attention import IMPLEMENTATION

_BLOCK_SIZE = 4
_STEPS = (((0, 5), (0, 2)), ((5, 9), (2, 3)))  # of A and B: the tokens computed
_LENGTHS = (9, 3)
_BLOCKS = ((3, 1, 5), (2,))
# Of the largest logit. What differs for a reason differs by tenths; bfloat16 rounds to 2 ** -8 in each of many layers.
_TOLERATED = {torch.float32: 1e-3, torch.bfloat16: 0.1}

Logits = Callable[[Batch, VariantAttention, torch.Tensor], torch.Tensor]


def prove(description: ModelDescription, device: Device, model: Any, logits_of: Logits) -> None:
    """`logits_of` a batch, its attention and rows: as the runner will ask. Raises ConfigurationError."""
    texts = [[(7 + 5 * index + 11 * which) % description.vocab_size for index in range(length)]
             for which, length in enumerate(_LENGTHS)]  # fmt: skip
    alone = [_alone(model, device, text) for text in texts]
    largest = max(float(logits.abs().max()) for logits in alone)
    for which, start, logits in _together(description, device, texts, logits_of):
        error = float((logits - alone[which][start : start + len(logits)]).abs().max())
        if not error <= _TOLERATED[device.dtype] * largest:
            raise ConfigurationError(
                f"model_type {description.architecture}: requests computed together differ from each alone by "
                f"{error:.3g} of logits up to {largest:.3g}, so kvyard cannot serve it"
            )


def _alone(model: Any, device: Device, text: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary], with the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids=torch.tensor([text], device=device.torch), use_cache=False)
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _together(
    description: ModelDescription, device: Device, texts: list[list[int]], logits_of: Logits
) -> list[tuple[int, int, torch.Tensor]]:
    """(which text, first token, float32 logits from there on) of every row of the two steps."""
    d = description
    builder = BatchBuilder(Geometry(d.num_heads, d.num_kv_heads, d.num_layers, _BLOCK_SIZE), device)
    table, found = RequestTable(_BLOCK_SIZE), []
    pool = KVPool(
        device,
        num_blocks=1 + max(block for blocks in _BLOCKS for block in blocks),
        kv_heads=d.num_kv_heads,
        layers=d.num_layers,
        block_size=_BLOCK_SIZE,
        head_size=d.head_size,
    )
    for number, ranges in enumerate(_STEPS):
        batch = builder.build(table.apply(_plan(number, texts, ranges)))
        rows = torch.arange(len(batch.token_ids), device=device.torch)
        attention = VariantAttention(pool, Geometry(d.num_heads, d.num_kv_heads, d.num_layers, _BLOCK_SIZE), batch)
        logits = logits_of(batch, attention, rows)
        # Rows of one token come first.
        packed = sorted(enumerate(ranges), key=lambda row: row[1][1] - row[1][0] > 1)
        used = 0
        for which, (start, end) in packed:
            found.append((which, start, logits[used : used + end - start]))
            used += end - start
    return found


def _plan(number: int, texts: list[list[int]], ranges: tuple[tuple[int, int], ...]) -> StepPlan:
    def int32(values: list[int]) -> bytes:
        return np.array(values, np.int32).tobytes()

    new = tuple(
        NewRequest(str(which), int32(text), len(text), SamplingParams()) for which, text in enumerate(texts)
    )  # fmt: skip
    return StepPlan(
        step=number,
        request_ids=tuple(str(which) for which in range(len(texts))),
        num_scheduled_tokens=int32([end - start for start, end in ranges]),
        num_computed_tokens=int32([start for start, _ in ranges]),
        num_sampled=int32([0] * len(texts)),
        num_new_blocks=int32([len(blocks) if number == 0 else 0 for blocks in _BLOCKS]),
        new_block_ids=int32([block for blocks in _BLOCKS for block in blocks] if number == 0 else []),
        new_requests=new if number == 0 else (),
    )
