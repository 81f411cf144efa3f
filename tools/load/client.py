"""The closed loop: N workers, each sends its next request when its last has ended.

No limit on connections, and a request's wait for one is measured apart. The loop's own lag is sampled all the while:
it is what the client itself adds to every time it measures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import msgspec

from tools.load.sample import Sample, StreamReader, error_text
from tools.load.workload import Workload

LAG_INTERVAL_S = 0.01
# Tried from the largest on: the first that the server takes as a token id bounds the random prompts.
VOCABULARIES = (30_000, 16_000, 8_000, 4_000, 2_000, 1_000, 256)


class ServerRefused(Exception):
    """The server cannot be measured; the text says why."""


class _Timed:
    """Of one request: when it had its connection. Handed to aiohttp's tracing as the request's context."""

    sent: float | None = None


class LoadClient:
    """`base` is the server's URL without /v1. `clock` gives seconds, monotonic."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: str, clock: Callable[[], float]) -> None:
        self._session, self._base, self._model, self._clock = session, base, model, clock

    async def send(self, prompt: list[int], output_len: int) -> Sample:
        """Never raises: whatever goes wrong is the sample's failure."""
        timed, began = _Timed(), self._clock()
        reader = StreamReader(output_len)
        failure: str | None = None
        try:
            async with self._session.post(
                f"{self._base}/v1/completions",
                json=completion_body(self._model, prompt, output_len),
                trace_request_ctx=timed,
            ) as answer:
                if answer.status != 200:
                    failure = f"HTTP {answer.status}: {await _error_in(answer)}"
                while failure is None and (data := await answer.content.readany()):
                    reader.feed(data, self._clock())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        return Sample(
            began=began,
            sent=began if timed.sent is None else timed.sent,
            ended=self._clock(),
            chunks=tuple(reader.chunks),
            last=reader.last,
            prompt_tokens=reader.prompt_tokens,
            output_tokens=reader.output_tokens,
            failure=failure or reader.failure(),
        )

    async def run(
        self, workload: Workload, concurrency: int, *, warm_up: bool, done: Callable[[Sample], object]
    ) -> list[Sample]:
        """In the order in which they ended."""
        samples: list[Sample] = []
        indexes = iter(range(workload.requests))

        async def worker(indexes: Iterator[int]) -> None:
            for index in indexes:
                samples.append(await self.send(workload.prompt(index, warm_up=warm_up), workload.output_len))
                done(samples[-1])

        async with anyio.create_task_group() as tasks:
            for _ in range(min(concurrency, workload.requests)):
                tasks.start_soon(worker, indexes)
        return samples

    async def vocabulary(self) -> int:
        """A bound below which every token id is valid, found by asking for one token. Raises ServerRefused."""
        refusal: str | None = None
        for size in VOCABULARIES:
            sample = await self.send([size - 1], 1)
            if sample.failure is None or not sample.failure.startswith("HTTP 4"):
                return size  # a failure of another kind is for the run to report
            refusal = sample.failure
        raise ServerRefused(f"the server refuses even a prompt of one token id: {refusal}")


def completion_body(model: str, prompt: list[int], output_len: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@asynccontextmanager
async def load_session(api_key: str | None, clock: Callable[[], float]) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit on connections, which notes when each request has its connection."""
    tracing = aiohttp.TraceConfig()

    async def connected(_: aiohttp.ClientSession, context: Any, __: object) -> None:
        context.trace_request_ctx.sent = clock()

    tracing.on_connection_create_end.append(connected)
    tracing.on_connection_reuseconn.append(connected)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        trace_configs=[tracing],
        json_serialize=lambda value: msgspec.json.encode(value).decode(),
    ) as session:
        yield session


async def first_model(session: aiohttp.ClientSession, base: str) -> dict[str, Any]:
    """The first of /v1/models. Raises ServerRefused."""
    try:
        async with session.get(f"{base}/v1/models", trace_request_ctx=_Timed()) as answer:
            if answer.status != 200:
                raise ServerRefused(f"{base}/v1/models answered {answer.status}: {await _error_in(answer)}")
            models = msgspec.json.decode(await answer.read(), type=dict[str, Any]).get("data")
    except (aiohttp.ClientError, OSError) as error:
        raise ServerRefused(f"{base} does not answer: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerRefused(f"{base}/v1/models is not understood: {error}") from None
    if not models:
        raise ServerRefused(f"{base}/v1/models names no model: give one with --model")
    return dict(models[0])


async def sample_lag(clock: Callable[[], float], lags: list[float]) -> None:
    """Until cancelled: how much later than asked the event loop wakes this task."""
    while True:
        asked = clock()
        await anyio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, clock() - asked - LAG_INTERVAL_S))


async def _error_in(answer: aiohttp.ClientResponse) -> str:
    body = await answer.read()
    try:
        return error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace")
