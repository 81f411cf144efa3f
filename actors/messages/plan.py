"""One step on its way to the ExecutorActor and back, as columns.

`bytes` columns are little-endian: "int32[n]" is 4·n bytes, read with `numpy.frombuffer`. Row i of every column of n
rows is the i-th scheduled request, in planning order. A plan is a value: the executor needs nothing but the plans in
order, so several may be in flight.
"""

from __future__ import annotations

import msgspec

from actors.messages.request import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the worker sees for the first time, or again after a preemption: it replaces what it knew."""

    request_id: str
    token_ids: bytes  # int32: all known tokens, prompt and accepted output
    num_prompt_tokens: int
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forward pass `step`. New and resumed requests are in `new_requests`; their rows follow in the columns too."""

    step: int
    request_ids: tuple[str, ...]  # n rows
    num_scheduled_tokens: bytes  # int32[n], each >= 1
    num_computed_tokens: bytes  # int32[n], before this step
    num_sampled: bytes  # int32[n]: 0 while a prefill is unfinished, else 1 (+ drafts, in a later issue)
    num_new_blocks: (
        bytes  # int32[n]: how many of `new_block_ids` belong to the row; appended, for new ones the whole table
    )
    new_block_ids: bytes  # int32[sum(num_new_blocks)]
    new_requests: tuple[NewRequest, ...] = ()
    dropped_request_ids: tuple[str, ...] = ()  # finished or preempted since the last plan: forget them first
    dropped_encoder_outputs: tuple[
        str, ...
    ] = ()  # hashes evicted since the last plan: forget them before any encoder runs

    @property
    def num_tokens(self) -> int:
        """Σ num_scheduled_tokens."""
        return sum(memoryview(self.num_scheduled_tokens).cast("i"))


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What step `step` sampled. Rows are those of the plan; a row has `num_sampled` tokens of `sampled_token_ids`."""

    step: int
    num_sampled: bytes  # int32[n]
    sampled_token_ids: bytes  # int32[sum(num_sampled)]
    execute_s: float = 0.0  # forward pass
    sample_s: float = 0.0
    waited_s: float = 0.0  # before it was launched, with no step under way: the executor had nothing to do


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The forward pass raised. The engine ends: its device state is unknown."""

    step: int
    error: str
