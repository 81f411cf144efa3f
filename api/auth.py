"""Who may ask: the middlewares that every HTTP shell of kvyard stands behind.

With a key set, all routes but the open ones need `Authorization: Bearer KEY`. Every error that aiohttp itself raises
(unknown route, wrong method, body too large) leaves in the shape of `api.errors`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from actors.messages.errors import RequestRefused
from api.errors import error_response, refusal_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_ROUTES = frozenset({"/health", "/ready", "/metrics"})


def authorized(header: str | None, api_key: str) -> bool:
    """Compared in constant time. The scheme's name may be in any case, as RFC 9110 says."""
    scheme, _, given = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), api_key.encode())


def require_key(api_key: str | None, open_routes: frozenset[str] = OPEN_ROUTES) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key is None or request.path in open_routes or authorized(request.headers.get("Authorization"), api_key):
            return await handler(request)
        text = "wrong or missing API key: send it as 'Authorization: Bearer KEY'"
        return error_response(401, text, code="invalid_api_key")

    return middleware


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: a refusal becomes its response, and so does an error of aiohttp's own."""
    try:
        return await handler(request)
    except RequestRefused as refused:
        return refusal_response(refused)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app._client_max_size
        return error_response(413, f"the body is larger than {limit} bytes", code="body_too_large")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = {404: f"no route {request.path}", 405: f"{request.path} does not take {request.method}"}
        response = error_response(error.status, text.get(error.status, error.reason))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
