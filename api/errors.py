"""Errors as a client sees them: `{"error": {message, type, param, code}}`, with one HTTP status each.

Owns the translation of every typed error of the engine into that shape; `middleware.py` puts it on the wire.
Invariant: whatever goes wrong, a client gets a body of this one shape.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from actors.messages.errors import ActorGone, AskTimeout, KvyardError, MailboxFull, RefusalReason, RequestRefused

LONGEST_MESSAGE, LONGEST_PARAM = 1000, 200  # characters: errors quote the client, who may have sent megabytes


class ApiError(Exception):
    """A request that ends with `status`. `param` names the field at fault; `headers` go out with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status, self.code, self.headers = status, code, headers or {}
        self.message = shortened(message, LONGEST_MESSAGE)
        self.param = None if param is None else shortened(param, LONGEST_PARAM)
        super().__init__(self.message)

    @property
    def type(self) -> str:
        return error_type(self.status)

    def body(self) -> bytes:
        return msgspec.json.encode(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    """400: the field `param` is wrong. `code` is one of OpenAI's words for how."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(400, message, code=code, param=param)


def shortened(text: str, longest: int) -> str:
    """Its beginning and its end: what it quotes is in the middle."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def error_type(status: int) -> str:
    """OpenAI's `type` of an error with this status."""
    if status in (401, 403):
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def of_refusal(refusal: RequestRefused) -> ApiError:
    headers = {}
    if refusal.reason.http_status == 429:
        # Whole seconds, at least one: RFC 9110 knows no fractions.
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after or 1)))
    return ApiError(
        refusal.reason.http_status, refusal.text, code=refusal.reason.value, param=refusal.param, headers=headers
    )


def of_exception(error: BaseException) -> ApiError | None:
    """The client's view of a typed error; None for one that nobody planned."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return of_refusal(error)
        case ActorGone() | AskTimeout() | MailboxFull():
            return ApiError(503, f"the engine cannot answer: {error}", code=RefusalReason.ENGINE_UNAVAILABLE.value)
        case KvyardError():
            return ApiError(500, str(error), code=RefusalReason.INTERNAL.value)
        case _:
            return None
