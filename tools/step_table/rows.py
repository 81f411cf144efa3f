"""The step table's model: one row per request and step, and what happened in a step in its order. Both sources fill it.

A step lasts from its plan to the next plan; what a result does belongs to the step that it is the result of. So with
async scheduling a row is whole only after later steps were planned, and rows still come out in the order of the steps.
"""

from __future__ import annotations

import msgspec

from actors.scheduling.records import StepNote


class StepRow(msgspec.Struct, kw_only=True):
    """Tokens and blocks are numbers of them. Σ (allocated − freed) of a request's rows is what it holds.

    Blocks are counted as references: one that two requests share is allocated and freed by each. Without the shared
    and the kept ones, Σ (allocated − freed) over all rows is what is not free of the pool.
    """

    step: int | None  # None: the plan has no rows, so it took no number
    request_id: str
    # Both after the plan, or after its end or a reset of the prefix cache later in the step.
    queue: str  # "running" | "waiting" | "skipped" | "": it waits for its lease, or has ended
    status: str  # "": it had ended before the step, or came after the plan
    num_computed_tokens: int  # before the step; prefix hits of this step are in it
    num_computed_tokens_after: int  # with the result: without the rejected drafts
    num_known_tokens: int  # known + drafts + placeholders = num_tokens_with_spec, which computed is to catch up with
    num_drafts: int = 0
    num_placeholders: int = 0
    num_prefix_hit_tokens: int = 0
    num_remote_tokens: int = 0  # the load of so many tokens began in this step
    num_scheduled_tokens: int = 0
    num_drafts_scheduled: int = 0
    num_drafts_accepted: int | None = None  # None: no draft was scheduled, or the result is not there
    blocks_allocated: int = 0
    blocks_shared: int = 0  # of the allocated: others held them already
    blocks_freed: int = 0
    blocks_kept: int = 0  # of the freed: others hold them still
    blocks_held: int = 0  # after the last that happened to it in this step
    events: list[str] = []
    token_ids: list[int] = []  # that came out
    why: str = ""  # it was not scheduled

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_known_tokens + self.num_drafts + self.num_placeholders

    @property
    def is_quiet(self) -> bool:
        """It was not scheduled, and nothing happened to it."""
        moved = self.num_scheduled_tokens or self.blocks_allocated or self.blocks_freed
        return not (moved or self.events or self.token_ids)


class Moment(msgspec.Struct):
    when: str
    what: str


class Step(msgspec.Struct, kw_only=True):
    number: int  # that it has, or, if the plan has no rows, that the next one will have; 0: before the first plan
    has_rows: bool = False
    num_scheduled_tokens: int = 0
    num_scheduled_requests: int = 0
    token_budget: int = 0
    free_before: int = 0  # blocks; before its plan
    free_after: int = 0  # before the next plan
    in_flight: bool = False
    moments: list[Moment] = []
    rows: dict[str, StepRow] = {}
    note: StepNote | None = None
    execute_s: float = 0.0
    sample_s: float = 0.0

    @property
    def label(self) -> int | None:
        return self.number if self.has_rows else None

    def tell(self, when: str, what: str) -> None:
        if self.moments and self.moments[-1].when == when:
            self.moments[-1].what += f"; {what}"
        else:
            self.moments.append(Moment(when, what))
