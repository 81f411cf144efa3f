"""Around every handler: request ids, the key, and errors in OpenAI's shape. Shared by engine and router.

Invariant: no answer leaves without X-Request-ID, and no error in another shape than `errors.py`'s.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from api.errors import ApiError, of_exception

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_ids(new_id: Callable[[], str]) -> Middleware:
    """Keeps a client's X-Request-ID if it is sane, else makes one. Read it as `request[REQUEST_ID]`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        theirs = request.headers.get("X-Request-ID", "")
        request[REQUEST_ID] = theirs if SANE_ID.fullmatch(theirs) else new_id()
        return await handler(request)

    return middleware


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `app.on_response_prepare`."""
    if REQUEST_ID in request:
        response.headers["X-Request-ID"] = request[REQUEST_ID]


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises before its first byte into an OpenAI-shaped answer."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(_of_http_exception(request, error))
    except web.RequestPayloadError as error:
        return error_response(ApiError(400, f"the body cannot be read: {error}", code="invalid_body"))
    except Exception as error:
        return error_response(client_view(error, request))


def client_view(error: Exception, request: web.Request) -> ApiError:
    """What a client gets to see of any error. One that nobody planned goes to the log, with its trace."""
    api_error = of_exception(error)
    if api_error is None:
        logger.error("request_failed request_id=%s path=%s", request.get(REQUEST_ID), request.path, exc_info=error)
        api_error = ApiError(500, "the server failed on this request; its log says how", code="internal_error")
    return api_error


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=error.headers)


def _of_http_exception(request: web.Request, error: web.HTTPException) -> ApiError:
    match error:
        case web.HTTPNotFound():
            return ApiError(404, f"there is no route {request.method} {request.path}", code="unknown_url")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {request.method}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"the body is too large: {error.text}", code="request_too_large")
        case _:
            return ApiError(error.status, error.reason or "the request cannot be served", code="http_error")


def require_key(api_key: str | None, protected: Sequence[str]) -> Middleware:
    """401 for a path under one of `protected` without `Authorization: Bearer <api_key>`. No key: all is open."""
    expected = api_key.encode() if api_key else None

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and any(
            request.path == prefix or request.path.startswith(prefix + "/") for prefix in protected
        ):
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            given_bytes = given.strip().encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given_bytes, expected):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return middleware
