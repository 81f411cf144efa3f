"""Which engines there are, what their last probes said, and who is next. Pure: no clock, no IO.

Round robin is "least recently used first", on each side, among the engines that may be used at all; so an engine that
comes back neither gets a burst nor is forgotten. A paused engine is well, requests may wait in it, but others go first.
Invariant: `choose` and `decode_for` return only healthy engines, and a prefill engine only beside a decode engine that
can read its blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from api.router.report import EngineListing, EngineReport

# The second probe in a row without an answer ends the waits for an engine; the first only keeps new requests away.
# One silent probe can be a stall; whoever has already sent a prompt loses work by giving up too early.
LOST_AFTER = 2

Side = Literal["prefill", "decode"]


@dataclass(eq=False)
class Engine:
    """One engine, by the URL that the router was given."""

    url: str
    side: Side
    report: EngineReport | None = None
    healthy: bool = False
    reason: str = "not probed yet"
    silent_probes: int = 0  # in a row
    answered_at: float | None = None  # the router's clock, seconds
    last_used: int = 0  # of the fleet's counter of choices

    @property
    def engine_id(self) -> str:
        return self.url if self.report is None else self.report.engine_id

    @property
    def role(self) -> str:
        return self.side if self.report is None else self.report.role

    @property
    def epoch(self) -> int | None:
        return None if self.report is None else self.report.epoch

    @property
    def paused(self) -> str:
        return "none" if self.report is None else self.report.paused

    def listing(self, unpaired: str) -> EngineListing:
        """`unpaired`: why a healthy engine has nobody to hand over to."""
        report = self.report
        return EngineListing(
            engine_id=self.engine_id,
            role=self.role,
            url=self.url,
            pid=None if report is None else report.pid,
            worker_pids=() if report is None else report.worker_pids,
            epoch=self.epoch,
            healthy=self.healthy,
            reason=self.reason or unpaired,
            paused=self.paused,
        )


class Choice(NamedTuple):
    prefill: Engine | None  # None: the decode engine computes the prompt itself
    decode: Engine


@dataclass
class _Refusal:
    """A decode engine cannot read a prefill engine's blocks, as seen between these two epochs."""

    reason: str
    prefill_epoch: int | None
    decode_epoch: int


@dataclass
class Fleet:
    engines: list[Engine]
    _choices: int = 0
    _refusals: dict[tuple[str, str], _Refusal] = field(default_factory=dict)  # (decode url, prefill engine_id)

    @classmethod
    def of(cls, prefill: Sequence[str], decode: Sequence[str]) -> Fleet:
        """URLs without a trailing slash; each may stand on one side only, once."""
        engines = [Engine(url.rstrip("/"), "prefill") for url in prefill]
        engines += [Engine(url.rstrip("/"), "decode") for url in decode]
        urls = [engine.url for engine in engines]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url} is no engine's URL: write it as http://HOST:PORT")
            if urls.count(url) > 1:
                raise ValueError(f"{url} is given more than once: name each engine once, on one side")
        return cls(engines)

    def engine(self, url: str) -> Engine:
        return next(engine for engine in self.engines if engine.url == url)

    # What the probes say

    def probed(self, url: str, report: EngineReport, now: float) -> None:
        engine = self.engine(url)
        engine.report, engine.silent_probes, engine.answered_at = report, 0, now
        engine.reason = self._wrong(engine, report) or ("" if report.healthy else report.reason or "unhealthy")
        engine.healthy = not engine.reason
        if engine.side == "decode":
            self._note_refusals(engine, report)

    def _wrong(self, engine: Engine, report: EngineReport) -> str | None:
        if report.role not in (engine.side, "both"):
            return f"its role is {report.role}, but the router was given it as --{engine.side}"
        for other in self.engines:
            if other is not engine and other.healthy and other.engine_id == report.engine_id:
                return f"{other.url} has the same engine id {report.engine_id}"
        return None

    def _note_refusals(self, decode: Engine, report: EngineReport) -> None:
        """A refusal counts for the prefill epoch at which it was first seen: a restarted engine gets a new chance."""
        before, self._refusals = self._refusals, {k: v for k, v in self._refusals.items() if k[0] != decode.url}
        epochs = {engine.engine_id: engine.epoch for engine in self.engines if engine.side == "prefill"}
        for engine_id, reason in report.incompatible_peers.items():
            key = (decode.url, engine_id)
            known = before.get(key)
            if known is None or (known.reason, known.decode_epoch) != (reason, report.epoch):
                known = _Refusal(reason, epochs.get(engine_id), report.epoch)
            self._refusals[key] = known

    def silent(self, url: str, reason: str) -> bool:
        """A probe got no answer. True: the engine is lost, whoever waits for it should stop."""
        engine = self.engine(url)
        engine.healthy, engine.reason = False, reason
        engine.silent_probes += 1
        return engine.silent_probes >= LOST_AFTER

    def unreachable(self, url: str, reason: str) -> None:
        """A request could not connect: no more of them before a probe gets through."""
        engine = self.engine(url)
        engine.healthy, engine.reason = False, reason

    # Who is next

    def compatible(self, prefill: Engine, decode: Engine) -> bool:
        if prefill.report is None or decode.report is None or prefill.report.kv_layout != decode.report.kv_layout:
            return False
        refusal = self._refusals.get((decode.url, prefill.engine_id))
        return refusal is None or refusal.prefill_epoch not in (None, prefill.epoch)

    def unpaired(self, prefill: Engine) -> str:
        """Why no healthy decode engine can read this prefill engine's blocks; "" when one can, or none is there."""
        decodes = [e for e in self.engines if e.side == "decode" and e.healthy and e.role != "both"]
        if prefill.side != "prefill" or not prefill.healthy or any(self.reads(e, prefill) for e in decodes):
            return ""
        return "; ".join(f"not paired with {e.engine_id}: {self._why_incompatible(prefill, e)}" for e in decodes)

    def _why_incompatible(self, prefill: Engine, decode: Engine) -> str:
        refusal = self._refusals.get((decode.url, prefill.engine_id))
        ours, theirs = (({} if e.report is None else e.report.kv_layout or {}) for e in (prefill, decode))
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if not differing:
            return "its KV layout is not known" if refusal is None else refusal.reason
        return ", ".join(f"{name} {ours.get(name)!r} here and {theirs.get(name)!r} there" for name in differing)

    def choose(self, tried: Collection[str] = ()) -> Choice | None:
        """The next pair without the engines whose URLs are in `tried`; None when no decode engine is left.

        An engine of role both is used alone, and so is a decode engine when there is no pair at all.
        """
        healthy = [engine for engine in self.engines if engine.healthy and engine.url not in tried]
        prefills = [engine for engine in healthy if engine.side == "prefill"]
        decodes = [engine for engine in healthy if engine.side == "decode"]
        partners = {decode.url: [p for p in prefills if self.reads(decode, p)] for decode in decodes}
        whole = [decode for decode in decodes if decode.role == "both" or partners[decode.url]]
        decode = self._next(whole or decodes)
        if decode is None:
            return None
        return Choice(self._next(partners[decode.url]), decode)

    def decode_for(self, prefill: Engine | None, tried: Collection[str], chosen: Engine | None) -> Engine | None:
        """The decode engine for a prompt that `prefill` holds or (None) that nobody has computed.

        It is the one `chosen` at first unless that has become unfit meanwhile.
        """
        fit = [e for e in self.engines if e.side == "decode" and e.healthy and e.url not in tried]
        if prefill is not None:
            fit = [engine for engine in fit if self.reads(engine, prefill)] or fit
        return chosen if chosen in fit else self._next(fit)

    def reads(self, decode: Engine, prefill: Engine) -> bool:
        """The decode engine can take over what the prefill engine holds."""
        return decode.role != "both" and self.compatible(prefill, decode)

    def _next(self, engines: Sequence[Engine]) -> Engine | None:
        if not engines:
            return None
        self._choices += 1
        engine = min(engines, key=lambda each: (each.paused != "none", each.last_used))
        engine.last_used = self._choices
        return engine

    @property
    def serving(self) -> bool:
        """Somebody can answer a request."""
        return any(engine.healthy and engine.side == "decode" for engine in self.engines)

    def listing(self) -> list[EngineListing]:
        return [engine.listing(self.unpaired(engine)) for engine in self.engines]
