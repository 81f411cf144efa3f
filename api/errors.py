"""The one shape of an error, as OpenAI's API has it: `{"error": {"message", "type", "param", "code"}}`.

`code` is a `RefusalReason` value, so a program can tell a full queue from a dead engine; `type` is the wide class that
OpenAI's clients know. Every error of every endpoint is made here.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from actors.messages.errors import RefusalReason, RequestRefused

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """JSON. `code` defaults to the type."""
    kind = _TYPES.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code or kind}})


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: float | None = None,
) -> web.Response:
    """`retry_after` is seconds, sent rounded up."""
    headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    body = error_body(status, message, param=param, code=code)
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


def refusal_response(refused: RequestRefused) -> web.Response:
    return error_response(
        refused.reason.http_status,
        refused.text,
        param=refused.param,
        code=refused.reason.value,
        retry_after=refused.retry_after,
    )


def error_event(reason: RefusalReason, message: str, *, param: str | None = None) -> bytes:
    """The last event of a stream that fails after its first byte; no `[DONE]` follows it."""
    return b"data: " + error_body(reason.http_status, message, param=param, code=reason.value) + b"\n\n"
