"""What the worker remembers of each request between plans: tokens, block table, sampling, its slot on the device.

A sampled token counts as soon as its step is launched; its value may still be on the device only, where the request's
slot holds the last one (last_tokens.py).

    tokens    | known on the host              | -1 -1 (their copies are on the way) |
                                                     '- last_sampled: its value lies in the slot

Invariant: the tables say what the plans applied so far have said, plus the tokens sampled here; no two live requests
share a slot. A plan that does not fit them is a bug of whoever made it and raises at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams

Int32 = npt.NDArray[np.int32]
_ON_ITS_WAY = np.array([-1], np.int32)


class _Growing:
    """int32 values that are appended to."""

    def __init__(self, values: Int32) -> None:
        self._buffer = values.copy()
        self.count = len(values)

    @property
    def values(self) -> Int32:
        return self._buffer[: self.count]

    def append(self, values: Int32) -> None:
        self.truncate_and_append(self.count, values)

    def truncate_and_append(self, count: int, values: Int32) -> None:
        end = count + len(values)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer), 16), np.int32)
            grown[:count] = self._buffer[:count]
            self._buffer = grown
        self._buffer[count:end] = values
        self.count = end


class RequestState:
    def __init__(self, request: NewRequest, slot: int) -> None:
        self.request_id = request.request_id
        self.slot = slot
        self.last_sampled = -1  # position in the sequence of the token that the slot holds; -1: of none
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling: SamplingParams = request.sampling
        self._tokens = _Growing(np.frombuffer(request.token_ids, np.int32))
        self._blocks = _Growing(np.empty(0, np.int32))

    @property
    def token_ids(self) -> Int32:
        return self._tokens.values

    @property
    def block_table(self) -> Int32:
        return self._blocks.values

    def add_blocks(self, block_ids: Int32) -> None:
        self._blocks.append(block_ids)

    def sampled(self, position: int) -> None:
        """The token at `position` of the sequence is there, on the device. Whatever stood from there on is void."""
        self._tokens.truncate_and_append(position, _ON_ITS_WAY)
        self.last_sampled = position

    def arrived(self, position: int, token_id: int) -> None:
        """In the order of the steps: of two tokens for one position the later step's stands."""
        if position < self._tokens.count:
            self._tokens.values[position] = token_id


class PlannedRow(msgspec.Struct, frozen=True):
    """Row `index` of a plan: compute the tokens [num_computed, num_computed + num_scheduled) of `state`."""

    index: int
    state: RequestState
    num_scheduled: int
    num_computed: int
    num_sampled: int
    new_block_ids: Int32
    from_slot: bool  # its last token is the one that the device holds in the state's slot

    @property
    def end(self) -> int:
        return self.num_computed + self.num_scheduled


class RequestTable:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._states: dict[str, RequestState] = {}
        self._free_slots: list[int] = []
        self.num_slots = 0  # slots are below this: as many as requests were ever known at once

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, plan: StepPlan) -> list[PlannedRow]:
        """Forgets, learns and extends as the plan says. Rows in planning order. Raises ValueError for a wrong plan."""
        for request_id in plan.dropped_request_ids:
            self._forget(request_id)
        for request in plan.new_requests:
            self._forget(request.request_id)
            self._states[request.request_id] = RequestState(request, self._take_slot())
        return list(self._rows(plan))

    def _forget(self, request_id: str) -> None:
        """Steps under way may still sample for it. The slot's next owner comes after them: steps run in order."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free_slots.append(state.slot)

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.num_slots += 1
        return self.num_slots - 1

    def _rows(self, plan: StepPlan) -> Iterator[PlannedRow]:
        scheduled, computed, sampled, num_blocks = (
            np.frombuffer(column, np.int32).tolist()
            for column in (plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_sampled, plan.num_new_blocks)
        )
        block_ids = np.frombuffer(plan.new_block_ids, np.int32)
        if len({len(column) for column in (plan.request_ids, scheduled, computed, sampled, num_blocks)}) != 1:
            raise ValueError(f"step {plan.step}: the columns differ in length")
        used = 0
        for index, request_id in enumerate(plan.request_ids):
            state = self._states[request_id]
            new_block_ids = block_ids[used : used + num_blocks[index]]
            used += num_blocks[index]
            state.add_blocks(new_block_ids)
            from_slot = state.last_sampled == computed[index] + scheduled[index] - 1
            row = PlannedRow(index, state, scheduled[index], computed[index], sampled[index], new_block_ids, from_slot)
            self._check(plan.step, row)
            yield row

    def _check(self, step: int, row: PlannedRow) -> None:
        known, room = len(row.state.token_ids), len(row.state.block_table) * self._block_size
        if row.num_scheduled < 1 or row.num_computed < 0 or row.num_sampled not in (0, 1):
            raise ValueError(f"step {step}, request {row.state.request_id}: {row.num_scheduled=} {row.num_sampled=}")
        if row.end > known or row.end > room:
            raise ValueError(
                f"step {step}, request {row.state.request_id}: computes up to token {row.end}, "
                f"but {known} are known and its blocks hold {room}"
            )
        on_host = row.state.token_ids[row.num_computed : row.end - row.from_slot]
        if len(on_host) and on_host.min() < 0:
            raise ValueError(
                f"step {step}, request {row.state.request_id}: computes tokens {row.num_computed} to {row.end - 1}, "
                "among them one that is still on its way from the device and not the last"
            )
