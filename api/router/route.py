"""One request's way through the fleet: whom to ask next, and what each answer or failure means. Pure.

`start`, `replied`, `prefilled` and `failed` each return what to do now. Each engine is asked at most once (a decode
engine once more when it refused the ticket itself), so a route ends after at most two questions per engine; and no
question is asked after the deadline. A prefill engine that stays silent may use half of what remains, and at most two
may: a quarter of the client's time is left for a decode engine to compute the prompt itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from actors.messages.errors import RefusalReason
from api.router.fleet import Engine, Fleet

MAX_SILENT_PREFILLS = 2
TICKET_USES = 2  # a decode engine that has refused the request has released the lease; one more try, then recompute
RETRY_AFTER_S = 1.0  # about one probe
# Statuses below 500 that speak of the deployment (key, time), not of the client's request.
_NOT_THE_CLIENT = frozenset({401, 403, 408})
_FINAL_CODES = frozenset({RefusalReason.KV_LOAD_FAILED.value, RefusalReason.DEADLINE_EXCEEDED.value})
_ABORTED = RefusalReason.ABORTED.value  # somebody wants this request gone: no other engine may take it up


class AskPrefill(msgspec.Struct, frozen=True):
    engine: Engine
    seconds: float


class AskDecode(msgspec.Struct, frozen=True):
    engine: Engine
    ticket: Any  # opaque JSON of the prefill engine; None: compute the prompt
    seconds: float


class PassOn(msgspec.Struct, frozen=True):
    """The engine's answer is the client's answer."""


class Refuse(msgspec.Struct, frozen=True):
    reason: RefusalReason
    text: str
    retry_after: float | None = None


Question = AskPrefill | AskDecode
Effect = AskPrefill | AskDecode | PassOn | Refuse


class Reply(msgspec.Struct, frozen=True):
    """An engine's answer that is no success."""

    status: int
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    @property
    def says_wrong_request(self) -> bool:
        return 400 <= self.status < 500 and self.status != 429 and self.status not in _NOT_THE_CLIENT

    @property
    def is_about_the_ticket(self) -> bool:
        return (self.param or "").partition(".")[0] == "kv_transfer_params"


@dataclass
class Route:
    fleet: Fleet
    deadline: float
    asking: Question | None = None
    retries: list[str] = field(default_factory=list)  # why another engine, or none, was asked; for the metrics
    _prefill: Engine | None = None  # that holds the ticket's blocks
    _decode: Engine | None = None  # chosen together with the prefill engine
    _ticket: Any = None
    _ticket_uses: int = 0
    _silent_prefills: int = 0
    _tried: list[str] = field(default_factory=list)  # URLs
    _full: list[float] = field(default_factory=list)  # the Retry-After of each engine that was full
    _trouble: list[str] = field(default_factory=list)

    def start(self, now: float) -> Effect:
        return self._next_prefill(now)

    def prefilled(self, ticket: Any, now: float) -> Effect:
        """The prefill engine's ticket, or None when its answer carried none."""
        assert isinstance(self.asking, AskPrefill)
        self._prefill, self._ticket = self.asking.engine, ticket
        if ticket is None:
            self.retries.append("no_ticket")
        return self._next_decode(now)

    def replied(self, reply: Reply, now: float) -> Effect:
        if reply.says_wrong_request:
            if reply.is_about_the_ticket and isinstance(self.asking, AskDecode) and self._ticket is not None:
                self._ticket = None
                self.retries.append("ticket_refused")
                return self._ask_decode(self.asking.engine, now)
            return PassOn()
        if reply.code == _ABORTED or (isinstance(self.asking, AskDecode) and reply.code in _FINAL_CODES):
            return PassOn()
        if reply.status == 429:
            self._full.append(RETRY_AFTER_S if reply.retry_after is None else reply.retry_after)
            return self._elsewhere("full", "its queue is full", now)
        return self._elsewhere("error", f"it answered {reply.status} {reply.code or ''}".rstrip(), now)

    def failed(self, kind: str, now: float) -> Effect:
        """No whole answer: kind is "unreachable", "disconnected", "lost" (by its probes), "timeout" or "malformed"."""
        assert self.asking is not None
        if kind == "unreachable":
            self.fleet.unreachable(self.asking.engine.url, "a request could not connect")
        if kind == "timeout" and isinstance(self.asking, AskPrefill):
            self._silent_prefills += 1
        return self._elsewhere(kind, kind, now)

    def _elsewhere(self, reason: str, trouble: str, now: float) -> Effect:
        assert self.asking is not None
        engine = self.asking.engine
        self._tried.append(engine.url)
        self._trouble.append(f"{engine.engine_id}: {trouble}")
        effect = self._next_prefill(now) if isinstance(self.asking, AskPrefill) else self._next_decode(now)
        if not isinstance(effect, Refuse):
            self.retries.append(reason)
        return effect

    def _next_prefill(self, now: float) -> Effect:
        if now >= self.deadline:
            return self._expired()
        choice = self.fleet.choose(self._tried)
        if choice is None:
            return self._none_left()
        self._decode = choice.decode
        if choice.prefill is not None and self._silent_prefills < MAX_SILENT_PREFILLS:
            return self._ask(AskPrefill(choice.prefill, (self.deadline - now) / 2))
        if self._full:
            # Every prefill engine that is well is full. Its work is not for the decode engines, whose tokens it delays.
            return self._none_left()
        return self._ask_decode(choice.decode, now)

    def _next_decode(self, now: float) -> Effect:
        if self._ticket_uses >= TICKET_USES:
            self._ticket = None
        holder = None if self._ticket is None else self._prefill
        if now >= self.deadline:
            return self._expired()
        engine = self.fleet.decode_for(holder, self._tried, self._decode)
        if engine is None:
            return self._none_left()
        if holder is not None and not self.fleet.reads(engine, holder):
            self._ticket = None
        return self._ask_decode(engine, now)

    def _ask_decode(self, engine: Engine, now: float) -> Effect:
        if now >= self.deadline:
            return self._expired()
        self._ticket_uses += self._ticket is not None
        return self._ask(AskDecode(engine, self._ticket, self.deadline - now))

    def _ask(self, question: Question) -> Effect:
        self.asking = question
        return question

    def _expired(self) -> Refuse:
        text = "the request's time is over before an engine began to answer"
        return Refuse(RefusalReason.DEADLINE_EXCEEDED, self._told(text))

    def _none_left(self) -> Refuse:
        if self._full:
            return Refuse(RefusalReason.QUEUE_FULL, self._told("every engine's queue is full"), min(self._full))
        return Refuse(RefusalReason.ENGINE_UNAVAILABLE, self._told("no engine can take the request"), RETRY_AFTER_S)

    def _told(self, text: str) -> str:
        trouble = self._trouble or [f"{e.engine_id}: {e.reason}" for e in self.fleet.engines if not e.healthy]
        return f"{text} ({'; '.join(trouble)})" if trouble else text
