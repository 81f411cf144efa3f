"""A scenario file, parsed: every key, type and name is checked before anything runs.

Owns the file format and nothing of the scheduler. A file that is not a scenario raises NotAScenario, whose text begins
with the JSON path at fault, or says where it stops being JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

ACTION_KINDS = ("add", "schedule", "update", "abort", "pause", "grammar_ready", "remote", "reset_prefix_cache")


class NotAScenario(Exception):
    def __init__(self, path: str, problem: str) -> None:
        """`path`: "" where there is none, since the file is not JSON."""
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}" if path else problem)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    usable_blocks: Count = 10_000
    block_size: Count = 16
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 8192
    max_model_len: Count | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = False
    chunked_prefill: bool = True
    long_prefill_token_threshold: Natural = 0
    num_spec_tokens: Natural = 0
    async_scheduling: bool = False
    reserve_full_sequence: bool = False
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    max_loras: Natural = 0
    encoder_budget: Natural = 0
    encoder_cache: Natural = 0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_connector: bool = False


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: Natural
    len: Count


class Encoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: str
    offset: Natural
    len: Count


class Remote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Natural | None
    is_async: bool = msgspec.field(default=True, name="async")


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    max_tokens: Count = 16
    min_tokens: Natural = 0
    priority: int = 0
    arrival: float | None = None
    eos: TokenId | None = None
    stop_token_ids: tuple[TokenId, ...] = ()
    lora: str | None = None
    cache_salt: str | None = None
    skip_prefix_cache: bool = False
    structured: bool = False
    encoder_inputs: tuple[Encoder, ...] = ()
    remote: Remote | None = None
    delay_free: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(segment.seed * 10_000 + place for segment in self.prompt for place in range(segment.len))


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sampled: dict[str, tuple[TokenId, ...]] = {}
    drafts: dict[str, tuple[TokenId, ...]] = {}
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    invalid_blocks: dict[str, tuple[Natural, ...]] = {}


class Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    preempt_running: bool = False


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the kinds is set."""

    add: tuple[str, ...] | None = None
    schedule: Nothing | None = None
    update: Update | None = None
    abort: tuple[str, ...] | None = None
    pause: Literal["new", "all", "none"] | None = None
    grammar_ready: tuple[str, ...] | None = None
    remote: dict[str, Remote] | None = None
    reset_prefix_cache: Reset | None = None
    expect: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        return next(kind for kind in ACTION_KINDS if getattr(self, kind) is not None)


class Scenario(msgspec.Struct, frozen=True):
    name: str
    why: str
    config: Config
    requests: dict[str, Request]
    actions: tuple[Action, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: dict[str, dict[str, Any]]
    actions: list[dict[str, Any]]
    name: str = ""
    why: str = ""
    config: dict[str, Any] = {}


OBSERVED = {
    "scheduled", "new", "resumed", "preempted", "spec", "cached", "loading", "finished", "output", "ok",
    "running", "waiting", "skipped", "status", "computed", "free_blocks",
}  # fmt: skip


def parse(text: bytes) -> Scenario:
    """Raises NotAScenario."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotAScenario("", f"not JSON (line {error.lineno}, column {error.colno}): {error.msg}") from None
    except UnicodeDecodeError as error:
        raise NotAScenario("", f"not JSON: no text at byte {error.start}") from None
    file = _convert(content, _File, "$")
    config = _convert(file.config, Config, "$.config")
    requests = {name: _convert(request, Request, f"$.requests.{name}") for name, request in file.requests.items()}
    actions = []
    for index, raw in enumerate(file.actions):
        path = f"$.actions[{index}]"
        given = [key for key in raw if key != "expect"]
        if len(given) != 1:
            raise NotAScenario(path, f"an action has one key beside expect, this one has {given}")
        action = _convert(raw, Action, path)
        if raw[given[0]] is None:
            raise NotAScenario(f"{path}.{given[0]}", "null is not an action")
        _check_names(action, requests, path)
        actions.append(action)
    return Scenario(file.name, file.why, config, requests, tuple(actions))


def _convert(value: Any, kind: type[T], path: str) -> T:
    """msgspec's own message, its path made absolute. Keys of maps, which it writes as [...], are found one by one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, inner = str(error).partition(" - at `$")
        raise NotAScenario(path + _name_keys(value, inner.rstrip("`"), kind), problem) from None


def _name_keys(value: Any, inner: str, kind: type[Any]) -> str:
    if "[...]" not in inner:
        return inner
    before, _, after = inner.partition("[...]")
    place = value
    for part in before.strip(".").split("."):
        place = place[part]
    for key in place:
        alone = _with(value, before.strip(".").split("."), {key: place[key]})
        try:
            msgspec.convert(alone, kind)
        except msgspec.ValidationError:
            return f"{before}.{key}{after}"
    return inner


def _with(value: Any, keys: list[str], leaf: Any) -> Any:
    return {**value, keys[0]: _with(value[keys[0]], keys[1:], leaf)} if keys else leaf


def _check_names(action: Action, requests: Mapping[str, Request], path: str) -> None:
    for name in action.expect:
        if name not in OBSERVED:
            raise NotAScenario(f"{path}.expect.{name}", "not a field of an observation")
    for kind in ("add", "grammar_ready", "abort"):
        for place, name in enumerate(getattr(action, kind) or ()):
            if name not in requests and kind != "abort":
                raise NotAScenario(f"{path}.{kind}[{place}]", f"no request {name!r}")
    for name in action.remote or ():
        if name not in requests:
            raise NotAScenario(f"{path}.remote.{name}", "no such request")
