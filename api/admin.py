"""`/admin`: pause, resume and prefix-cache reset over HTTP. The bodies are read here for engine and router alike.

An order has a deadline as a request has; when it passes, only the waiting for an answer ends, not the pause.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from aiohttp import web

from actors.messages.admission import GrantReport
from actors.messages.control import (
    ControlMessage,
    PauseMode,
    PauseReport,
    PauseScheduler,
    PrefixCacheReport,
    ResetPrefixCache,
    ResumeScheduler,
)
from actors.messages.errors import AskTimeout, RefusalReason
from api.deadlines import TIMEOUT_HEADER, Timeout, header_seconds, read_body, shortest
from api.engine_handle import EngineHandle
from api.errors import ApiError, InvalidRequest
from api.middleware import json_response
from api.openai.bodies import convert, json_object

PATHS = ("/admin/pause", "/admin/resume", "/admin/reset_prefix_cache")
MODES: tuple[PauseMode, ...] = get_args(PauseMode)
MAX_HOLDERS = 5  # named in an error


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Any = None
    timeout: Timeout | None = None


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout: Timeout | None = None


class ResetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    preempt_running: bool | None = None
    timeout: Timeout | None = None


Body = PauseBody | ResumeBody | ResetBody
BODIES: dict[str, type[PauseBody] | type[ResumeBody] | type[ResetBody]] = dict(
    zip(PATHS, (PauseBody, ResumeBody, ResetBody), strict=True)
)


class Order(msgspec.Struct, frozen=True):
    message: ControlMessage
    seconds: float  # from the request's arrival, for the answer
    raw: bytes  # the body


async def read_order(request: web.Request, default_seconds: float) -> Order:
    """Raises InvalidRequest that names the field at fault and what is accepted."""
    header = header_seconds(request.headers.get(TIMEOUT_HEADER))
    raw = await read_body(request, shortest(None, header, default_seconds))
    body = _body(BODIES[request.path], json_object(raw if raw.strip() else b"{}"))
    return Order(_message(body), shortest(body.timeout, header, default_seconds), raw)


def _body(kind: type[PauseBody] | type[ResumeBody] | type[ResetBody], fields: dict[str, Any]) -> Body:
    try:
        return convert(fields, kind)
    except InvalidRequest as error:
        if error.code != "unknown_parameter":
            raise
        names = ", ".join(kind.__struct_fields__)
        raise InvalidRequest(f"{error.message}; the fields here are: {names}", error.param, error.code) from None


def _message(body: Body) -> ControlMessage:
    match body:
        case PauseBody():
            return PauseScheduler(_mode(body.mode))
        case ResumeBody():
            return ResumeScheduler()
        case ResetBody():
            return ResetPrefixCache(bool(body.preempt_running))


def _mode(mode: Any) -> PauseMode:
    for known in MODES:
        if mode == known:
            return known
    accepted = " or ".join(repr(known) for known in MODES)
    if mode is None:
        raise InvalidRequest(f"'mode' is required: {accepted}", "mode", "missing_required_parameter")
    code = "invalid_value" if isinstance(mode, str) else "invalid_type"
    raise InvalidRequest(f"'mode' must be {accepted}, not {mode!r}", "mode", code)


class Admin:
    """The routes of one engine."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    async def order(self, request: web.Request) -> web.Response:
        engine = self._engine
        arrival = engine.clock()
        order = await read_order(request, engine.configuration.request_timeout)
        try:
            left = max(0.0, arrival + order.seconds - engine.clock())
            report: PauseReport | PrefixCacheReport = await engine.admission.ask(order.message, left)
        except AskTimeout as error:
            text = f"not within {order.seconds:g} s: {self._standing(order.message)}"
            raise ApiError(504, text, code=RefusalReason.DEADLINE_EXCEEDED.value) from error
        match report:
            case PauseReport(reached=False):
                text = f"another pause or a resume took this one's place; paused is now {report.paused!r}"
                raise ApiError(409, text, code="pause_superseded")
            case PrefixCacheReport(done=False):
                raise ApiError(409, _who_holds(report), code="kv_blocks_held")
            case PrefixCacheReport():
                return json_response({"done": True, "blocks_held": report.blocks_held})
            case PauseReport():
                return json_response(msgspec.structs.asdict(report))  # without its tag

    def _standing(self, message: ControlMessage) -> str:
        stats = self._engine.metrics.stats
        match message:
            case PauseScheduler():
                return (
                    f"the pause stays in force but is not reached, {_steps(stats.steps_in_flight)} in flight and "
                    f"{stats.running} requests run; POST /admin/resume takes it back"
                )
            case ResetPrefixCache(preempt_running=True):
                return f"{_steps(stats.steps_in_flight)} in flight; the reset is made when none is left"
            case ResetPrefixCache() | ResumeScheduler():
                return "the engine has not answered"


def _steps(number: int) -> str:
    return "1 step is" if number == 1 else f"{number} steps are"


def _who_holds(report: PrefixCacheReport) -> str:
    named = "; ".join(_holder(grant) for grant in report.grants[:MAX_HOLDERS])
    more = len(report.grants) - MAX_HOLDERS
    return (
        f"{report.blocks_held} KV blocks are held, and nothing was forgotten: {named}"
        + (f"; and {more} more" if more > 0 else "")
        + ". See /debug/blocks"
    )


def _holder(grant: GrantReport) -> str:
    return f"{grant.request_id} has {grant.blocks} ({grant.state}: {grant.reason})"
