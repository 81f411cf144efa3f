"""HTTP from the router to its engines: one session, no limit on connections, every failure of one type.

A limit on connections would show as the engines' latency; the engines' own queue limits are the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from api.router.route import Reply

CONNECT_SECONDS = 5.0
READ_BUFFER = 1 << 16  # bytes, before the engine is made to wait for a slow client


class UpstreamFailed(Exception):
    """kind: "unreachable" (no connection), "disconnected" (no whole answer) or "malformed"."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class Upstream:
    def __init__(self, session: aiohttp.ClientSession, api_key: str | None) -> None:
        self._session = session
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    @staticmethod
    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            headers={"Accept-Encoding": "identity", "User-Agent": "kvyard-router"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def request(
        self, method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """The answer's head; the caller reads and closes it. No deadline: the caller's scope has one."""
        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            return await self._session.request(method, url, data=body, headers=sent, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamFailed("unreachable", f"no connection to {url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed("disconnected", f"{url} gave no answer: {error!r}") from error

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        answer = await self.request("GET", url, headers=headers)
        try:
            return answer.status, await read_all(answer)
        finally:
            answer.close()


async def read_all(answer: aiohttp.ClientResponse) -> bytes:
    try:
        return await answer.read()
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFailed("disconnected", f"{answer.url} stopped inside its answer: {error!r}") from error


async def read_some(answer: aiohttp.ClientResponse) -> bytes:
    """What has come, at least a byte; b"" at a proper end. Raises UpstreamFailed at an improper one."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFailed("disconnected", f"{answer.url} stopped inside its stream: {error!r}") from error


def reply_of(answer: aiohttp.ClientResponse, body: bytes) -> Reply:
    """The parts of an error that the route decides by; whatever is not OpenAI-shaped counts by its status alone."""
    code = param = None
    try:
        error: Any = msgspec.json.decode(body)["error"]
        code, param = error.get("code"), error.get("param")
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        pass
    try:
        retry_after: float | None = max(0.0, float(answer.headers["Retry-After"]))
    except (KeyError, ValueError):
        retry_after = None
    return Reply(answer.status, _text(code), _text(param), retry_after)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
