"""Runs a step log again: the same class gets the same inputs, and each plan must be the recorded one, byte for byte.

A difference means that the core depends on something which is no input of it, or is not the core that wrote the log.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from actors.messages.errors import KvyardError
from actors.messages.plan import NewRequest, StepPlan
from actors.scheduling.connector import Connector
from actors.scheduling.core import SchedulerCore
from actors.scheduling.records import (
    Aborted,
    Added,
    DraftsSet,
    EffectsTaken,
    Expired,
    GrammarReady,
    Header,
    Input,
    PauseSet,
    PlanFailed,
    Planned,
    PrefixCacheReset,
    Record,
    ReportApplied,
    StepApplied,
)

_encode = msgspec.msgpack.Encoder().encode
_COLUMNS = ("num_scheduled_tokens", "num_computed_tokens", "num_sampled", "num_new_blocks")  # one value per row


class PlanDiffers(KvyardError):
    """`step` is the recorded plan's. `replayed` None: the recorded run failed to plan, and the replay did not."""

    def __init__(self, step: int, recorded: StepPlan | None, replayed: StepPlan | None, text: str) -> None:
        self.step, self.recorded, self.replayed = step, recorded, replayed
        super().__init__(text)


class CoreRaised(KvyardError):
    """The core raised at `record`. Where the recorded run ended with this record, it raised there, too."""

    def __init__(self, record: Record, error: Exception) -> None:
        self.record, self.error = record, error
        super().__init__(f"the core raised {type(error).__name__}: {error}")


class Replay:
    def __init__(self, header: Header, connector: Connector | None = None) -> None:
        """`connector`: for a core that was recorded with one of its own; it must answer as that one did."""
        self.header = header
        self.core = SchedulerCore(header.configuration, connector)
        self.in_flight: dict[int, StepPlan] = {}  # steps planned whose result has not come
        self.last_step = 0
        self.now = header.started
        self.num_steps = self.num_inputs = self.num_requests = 0

    def take(self, record: Record) -> None:
        """The next record of the log. Raises PlanDiffers, or CoreRaised; after either the replay has ended."""
        self.now = getattr(record, "now", self.now)
        try:
            match record:
                case Planned():
                    self._plan(record)
                case PlanFailed():
                    self._fail_to_plan(record)
                case StepApplied() | Added() | Aborted() | Expired() | ReportApplied() | EffectsTaken():
                    self._give(record)
                case DraftsSet() | GrammarReady() | PauseSet() | PrefixCacheReset():
                    self._give(record)
        except PlanDiffers:
            raise
        except Exception as error:
            raise CoreRaised(record, error) from error

    def _give(self, record: Input) -> None:
        core = self.core
        self.num_inputs += 1
        match record:
            case Added():
                self.num_requests += 1
                core.add(record.request, record.now, record.extras)
            case Aborted():
                core.abort(record.request_id, record.now, record.reason)
            case Expired():
                core.expire(record.now)
            case ReportApplied():
                core.apply(record.report, record.now)
            case StepApplied():
                if record.result is not None:
                    self.in_flight.pop(record.result.step, None)
                core.apply_step(record.result, record.bad_blocks, record.now)
            case DraftsSet():
                core.set_drafts(record.request_id, record.tokens)
            case GrammarReady():
                core.grammar_ready(record.request_id)
            case PauseSet():
                core.pause(cast(Literal["none", "new", "all"], record.mode))
            case PrefixCacheReset():
                core.reset_prefix_cache(record.now, record.preempt_running)
            case EffectsTaken():
                core.take_effects()
                core.take_kv_events()  # nobody wants them here

    def _plan(self, record: Planned) -> None:
        replayed = self.core.schedule(record.now)
        if _encode(replayed) != _encode(record.plan):
            text = f"step {record.plan.step} differs: {difference(record.plan, replayed)}"
            raise PlanDiffers(record.plan.step, record.plan, replayed, text)
        if replayed.request_ids:
            self.num_steps += 1
            self.last_step = replayed.step
            self.in_flight[replayed.step] = replayed

    def _fail_to_plan(self, record: PlanFailed) -> None:
        replayed = self.core.schedule(record.now)
        text = f"the recorded run failed to plan step {replayed.step} ({record.error}), the replay planned it"
        raise PlanDiffers(replayed.step, None, replayed, text)


def difference(recorded: StepPlan, replayed: StepPlan) -> str:
    """The first field and row in which two plans differ, in words."""
    if recorded.step != replayed.step:
        return f"recorded as step {recorded.step}, replayed as step {replayed.step}"
    ids, other_ids = recorded.request_ids, replayed.request_ids
    for row, (one, other) in enumerate(zip(ids, other_ids, strict=False)):
        if one != other:
            return f"request_ids, row {row}: recorded {one}, replayed {other}"
    if len(ids) != len(other_ids):
        shorter, longer = sorted((ids, other_ids), key=len)
        where = "only recorded" if longer is ids else "only replayed"
        return f"request_ids, row {len(shorter)}: {longer[len(shorter)]} is {where}"
    for name in _COLUMNS:
        pairs = zip(_ints(getattr(recorded, name)), _ints(getattr(replayed, name)), strict=False)
        for row, (value, other_value) in enumerate(pairs):
            if value != other_value:
                return f"{name}, row {row} ({ids[row]}): recorded {value}, replayed {other_value}"
    return _difference_behind_the_columns(recorded, replayed)


def _difference_behind_the_columns(recorded: StepPlan, replayed: StepPlan) -> str:
    blocks, other_blocks = _ints(recorded.new_block_ids), _ints(replayed.new_block_ids)
    end = 0
    for row, count in enumerate(_ints(recorded.num_new_blocks)):
        start, end = end, end + count
        if blocks[start:end] != other_blocks[start:end]:
            return (
                f"new_block_ids, row {row} ({recorded.request_ids[row]}): "
                f"recorded {blocks[start:end]}, replayed {other_blocks[start:end]}"
            )
    for place, (new, other) in enumerate(zip(recorded.new_requests, replayed.new_requests, strict=False)):
        if new != other:
            return f"new_requests, row {place} ({new.request_id}): {_difference_of_new(new, other)}"
    for name in StepPlan.__struct_fields__:
        one, other_one = getattr(recorded, name), getattr(replayed, name)
        if one != other_one:
            return f"{name}: recorded {_short(one)}, replayed {_short(other_one)}"
    return "their bytes"


def _difference_of_new(recorded: NewRequest, replayed: NewRequest) -> str:
    for name in NewRequest.__struct_fields__:
        one, other = getattr(recorded, name), getattr(replayed, name)
        if one == other:
            continue
        if name == "token_ids":
            tokens, other_tokens = _ints(one), _ints(other)
            for place, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=False)):
                if token != other_token:
                    return f"token {place}: recorded {token}, replayed {other_token}"
            return f"recorded {len(tokens)} tokens, replayed {len(other_tokens)}"
        return f"{name}: recorded {_short(one)}, replayed {_short(other)}"
    return "its bytes"


def _ints(column: bytes) -> list[int]:
    return memoryview(column[: len(column) // 4 * 4]).cast("i").tolist()


def _short(value: object) -> str:
    if isinstance(value, tuple):
        value = tuple(getattr(each, "request_id", each) for each in value)
    return repr(value)[:200]
