"""What `up` asks its members over HTTP: whether they are ready, and what they serve."""

from __future__ import annotations

from typing import Any

import aiohttp
import anyio

from tools.deployment.plan import Deployment, Member

POLL_S = 0.05
ANSWER_S = 5.0


class Inquiry:
    def __init__(self, session: aiohttp.ClientSession, api_key: str | None) -> None:
        self._session = session
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def wait_ready(self, member: Member) -> None:
        """Returns when GET /ready answers 200."""
        while True:
            if await self._status(f"{member.url}/ready") == 200:
                return
            await anyio.sleep(POLL_S)

    async def ready_line(self, deployment: Deployment) -> str:
        """Waits until the router has found every engine well, then says what the deployment serves."""
        while True:
            try:
                if line := await self._line(deployment):
                    return line
            except (aiohttp.ClientError, OSError):
                pass  # something has just ended; it starts again
            await anyio.sleep(POLL_S)

    async def _line(self, deployment: Deployment) -> str | None:
        url = deployment.router.url
        if not all(engine["healthy"] for engine in await self._json(f"{url}/debug/engines")):
            return None
        model = (await self._json(f"{url}/v1/models"))["data"][0]["id"]
        transport = (await self._json(f"{deployment.engines[-1].url}/debug/engine"))["transport"]
        prefill = sum(engine.name.startswith("prefill-") for engine in deployment.engines)
        decode = len(deployment.engines) - prefill
        return f"kvyard ready: {url}/v1 model={model} prefill={prefill} decode={decode} transport={transport}"

    async def _status(self, url: str) -> int:
        try:
            async with self._session.get(url) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def _json(self, url: str) -> Any:
        async with self._session.get(url, headers=self._headers) as answer:
            answer.raise_for_status()
            return await answer.json()
