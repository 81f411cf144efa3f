"""A step under construction, column by column, and what is kept of it until its result comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.messages.plan import NewRequest, StepPlan
from actors.scheduling.orders import int32
from actors.scheduling.request import EncoderInput, SchedulerRequest

BadBlocks = Mapping[str, Sequence[int]]  # request id -> indexes into its block table


class ScheduledStep:
    """Row i of `requests` and of the columns is one scheduled request. Invariant: Σ counts + `budget` is constant."""

    __slots__ = (
        "budget",
        "cached",
        "computed",
        "counts",
        "drafts",
        "encoder_budget",
        "encoder_runs",
        "epochs",
        "has_prefill_chunk",
        "loading",
        "new",
        "new_block_counts",
        "new_blocks",
        "new_requests",
        "num_running",
        "preempted",
        "requests",
        "resumed",
        "sampled",
        "step",
    )

    def __init__(self, step: int, budget: int, encoder_budget: int) -> None:
        self.step = step
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.requests: list[SchedulerRequest] = []
        self.counts: list[int] = []
        self.computed: list[int] = []  # before this step
        self.epochs: list[int] = []  # the request's; if it has a newer one when the result comes, the row is void
        self.sampled: list[int] = []  # most tokens that the step can give: 0, or 1 + drafts
        self.new_block_counts: list[int] = []
        self.new_blocks: list[int] = []
        self.drafts: dict[str, list[int]] = {}
        self.encoder_runs: dict[str, list[EncoderInput]] = {}
        self.num_running = 0  # rows that the running pass made
        self.has_prefill_chunk = False  # a running request that had an unfinished prefill before this step
        self.new_requests: list[NewRequest] = []
        # What happened, in order; for observers.
        self.new: list[str] = []
        self.resumed: list[str] = []
        self.preempted: list[str] = []
        self.cached: dict[str, int] = {}
        self.loading: dict[str, int] = {}

    def add_row(self, request: SchedulerRequest, count: int, sampled: int, new_blocks: list[int]) -> None:
        """Before the request's `num_computed_tokens` is advanced."""
        self.requests.append(request)
        self.counts.append(count)
        self.computed.append(request.num_computed_tokens)
        self.epochs.append(request.epoch)
        self.sampled.append(sampled)
        self.new_block_counts.append(len(new_blocks))
        self.new_blocks += new_blocks
        self.budget -= count

    def remove_row(self, row: int) -> None:
        """Takes back what `add_row` did, and the request's drafts and encoder runs."""
        request_id = self.requests[row].request_id
        self.budget += self.counts[row]
        self.encoder_budget += sum(item.length for item in self.encoder_runs.pop(request_id, ()))
        self.drafts.pop(request_id, None)
        first = sum(self.new_block_counts[:row])
        del self.new_blocks[first : first + self.new_block_counts[row]]
        del self.requests[row]
        for column in (self.counts, self.computed, self.epochs, self.sampled, self.new_block_counts):
            del column[row]

    def plan(
        self, dropped_request_ids: tuple[str, ...] = (), dropped_encoder_outputs: tuple[str, ...] = ()
    ) -> StepPlan:
        return StepPlan(
            step=self.step,
            request_ids=tuple([request.request_id for request in self.requests]),
            num_scheduled_tokens=int32(self.counts),
            num_computed_tokens=int32(self.computed),
            num_sampled=int32(self.sampled),
            num_new_blocks=int32(self.new_block_counts),
            new_block_ids=int32(self.new_blocks),
            new_requests=tuple(self.new_requests),
            dropped_request_ids=dropped_request_ids,
            dropped_encoder_outputs=dropped_encoder_outputs,
        )
