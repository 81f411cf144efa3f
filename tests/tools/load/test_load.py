"""The load generator's figures, against streams whose times are known, and against a server that does as told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web
from click.testing import CliRunner

from tools.load.client import LoadClient, ServerRefused, first_model, load_session
from tools.load.command import load
from tools.load.report import Distribution, Run, report_of
from tools.load.sample import Sample, StreamReader
from tools.load.session import base_of, printed
from tools.load.workload import Workload

RUN = Run(url="http://s", model="m", concurrency=2, input_len=3, output_len=4, seed=0)


def event(text: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 3, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


def sample(**changed: Any) -> Sample:
    values: dict[str, Any] = {
        "began": 10.0,
        "sent": 10.5,
        "ended": 14.0,
        "chunks": (11.5, 12.5, 13.5),
        "last": 13.5,
        "prompt_tokens": 3,
        "output_tokens": 5,
    }
    return Sample(**{**values, **changed})


def test_times_of_one_request_by_hand() -> None:
    one = sample()
    assert one.connection_wait == 0.5
    assert one.time_to_first_token == 1.0  # from the connection on, not from the wait for it
    assert one.times_between_chunks == [1.0, 1.0]  # three chunks …
    assert one.time_between_tokens == 0.5  # … but five tokens in (13.5 − 11.5) s
    assert one.end_to_end == 3.5


def test_a_run_by_hand() -> None:
    samples = [
        sample(),
        sample(began=11.0, sent=11.0, chunks=(14.0,), last=14.0, ended=15.0, output_tokens=1),
        sample(began=11.0, ended=20.0, chunks=(), last=0.0, output_tokens=0, failure="HTTP 500: no"),
        sample(failure="HTTP 500: no"),
    ]
    report = report_of(RUN, samples, [0.0, 0.002])
    assert (report.requests, report.completed, report.failed, report.failures) == (4, 2, 2, {"HTTP 500: no": 2})
    assert report.duration_s == 10.0  # 10.0 to 20.0: failures take part of the run's time
    assert (report.output_tokens, report.output_tokens_per_s, report.requests_per_s) == (6, 0.6, 0.2)
    first = report.time_to_first_token_s
    assert first is not None
    assert (first.mean, first.p50) == (2.0, 2.0)  # of 1.0 and 3.0
    assert first.p90 == pytest.approx(2.8)  # 1.0 + 0.9 × 2.0
    assert report.time_between_tokens_s == Distribution(0.5, 0.5, 0.5, 0.5)  # a single token has none
    assert report.time_between_chunks_s == Distribution(1.0, 1.0, 1.0, 1.0)
    assert report.verdict == "ok"


def test_percentiles_of_zero_to_a_hundred() -> None:
    assert Distribution.of([float(value) for value in range(100, -1, -1)]) == Distribution(50.0, 50.0, 90.0, 99.0)
    assert Distribution.of([1.0, 2.0]) == Distribution(1.5, 1.5, 1.9, 1.99)
    assert Distribution.of([]) is None


def test_a_client_that_lags_gives_no_verdict() -> None:
    # Chunks every second: 0.1 s of lag is the bound.
    assert report_of(RUN, [sample()], [0.09, 0.1]).verdict == "ok"
    verdict = report_of(RUN, [sample()], [0.11, 0.11]).verdict
    assert verdict.startswith("none: the client was the bottleneck")
    assert "110.0 ms late" in verdict
    assert report_of(RUN, [sample(failure="x")], []).verdict == "none: no request succeeded"


def test_a_stream_cut_anywhere_reads_the_same() -> None:
    stream = event("a") + event("") + event("bc") + USAGE + DONE
    for cut in range(len(stream)):
        reader = StreamReader(4)
        reader.feed(stream[:cut], 1.0)
        reader.feed(stream[cut:], 2.0)
        assert reader.failure() is None, cut
        assert len(reader.chunks) == 2  # the event without text is none
        assert reader.output_tokens == 4


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (event("a") + USAGE, "the stream ended without [DONE]"),
        (event("a") + DONE, "the stream carried no usage"),
        (USAGE + DONE, "the stream carried no text to time its first token by"),
        (event("a") + event(usage={"completion_tokens": 3}) + DONE, "3 tokens instead of 4"),
        (event("a") + b'data: {"error": {"message": "gone"}}\n\n', "error event: gone"),
        (b"data: {broken\n\n" + DONE, "an event of the stream is no JSON"),
    ],
)
def test_a_bad_stream_is_a_failure_with_its_reason(stream: bytes, failure: str) -> None:
    reader = StreamReader(4)
    reader.feed(stream, 1.0)
    assert reader.failure() == failure


def test_prompts_are_of_exact_length_distinct_and_the_same_for_a_seed() -> None:
    workload = Workload(requests=3, input_len=50, output_len=1, vocabulary=2000, seed=7)
    prompts = [workload.prompt(i) for i in range(3)] + [workload.prompt(i, warm_up=True) for i in range(3)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 6
    assert all(1000 <= token < 2000 for prompt in prompts for token in prompt)
    assert workload.prompt(1) == Workload(requests=9, input_len=50, output_len=1, vocabulary=2000, seed=7).prompt(1)


def test_the_url_may_be_that_of_the_ready_line() -> None:
    assert base_of("http://127.0.0.1:8000/v1") == base_of("127.0.0.1:8000/") == "http://127.0.0.1:8000"


class Server:
    """Takes completions of a vocabulary; holds `held` requests together before it answers any of them."""

    def __init__(self, *, vocabulary: int = 50_000, held: int = 1, fail: int = 0) -> None:
        self.vocabulary, self.held, self.fail = vocabulary, held, fail
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self._all_here = anyio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first", "max_model_len": 100}, {"id": "second"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if max(body["prompt"]) >= self.vocabulary:
            return web.json_response({"error": {"message": "token id too large"}}, status=400)
        if len(body["prompt"]) > 1:
            self.bodies.append(body)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            if self.under_way == self.held:
                self._all_here.set()
            await self._all_here.wait()
            self.under_way -= 1
            if len(self.bodies) <= self.fail:
                return web.json_response({"error": {"message": "queue full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("x"))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await response.write(event(usage=usage) + DONE)
        return response


@pytest.fixture
def clock() -> Any:
    return anyio.current_time


async def test_a_run_keeps_the_concurrency_and_sends_what_was_asked(clock: Any) -> None:
    server = Server(held=3)
    async with server.serving() as url, load_session(None, clock) as session:
        client = LoadClient(session, url, "m", clock)
        seen: list[Sample] = []
        workload = Workload(requests=9, input_len=20, output_len=4, vocabulary=30_000, seed=1)
        samples = await client.run(workload, 3, warm_up=False, done=seen.append)
    assert [s.failure for s in samples] == [None] * 9
    assert seen == samples
    assert server.most_under_way == 3  # never more; and all three at once, or nobody would have been answered
    assert sorted(body["prompt"] for body in server.bodies) == sorted(workload.prompt(i) for i in range(9))
    wanted = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True, "model": "m"}
    assert {name: server.bodies[0][name] for name in wanted} == wanted
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert all(s.began <= s.sent < s.chunks[0] <= s.last <= s.ended for s in samples)
    assert {(s.prompt_tokens, s.output_tokens) for s in samples} == {(20, 4)}


@pytest.mark.parametrize(("vocabulary", "bound"), [(50_000, 30_000), (4_000, 4_000), (300, 256)])
async def test_the_vocabulary_is_found_out(clock: Any, vocabulary: int, bound: int) -> None:
    async with Server(vocabulary=vocabulary).serving() as url, load_session(None, clock) as session:
        assert await LoadClient(session, url, "m", clock).vocabulary() == bound


async def test_a_server_that_takes_no_ids_or_is_not_there_is_no_run(clock: Any) -> None:
    async with load_session(None, clock) as session:
        async with Server(vocabulary=10).serving() as url:
            with pytest.raises(ServerRefused, match="HTTP 400: token id too large"):
                await LoadClient(session, url, "m", clock).vocabulary()
            assert (await first_model(session, url))["id"] == "first"
        with pytest.raises(ServerRefused, match="does not answer"):
            await first_model(session, url)


async def kvyard_load(url: str, *flags: str) -> Any:
    """The command in a thread: it brings its own event loop."""
    arguments = [url, "--concurrency", "2", "--requests", "4", "--input-len", "5", "--output-len", "4", *flags]
    return await anyio.to_thread.run_sync(lambda: CliRunner(env={"KVYARD_API_KEY": None}).invoke(load, arguments))


async def test_the_command_prints_one_json_object_and_exits_0() -> None:
    server = Server()
    async with server.serving() as url:
        result = await kvyard_load(url + "/v1", "--json", "--warm-up", "2")
    report = json.loads(result.stdout)
    assert (report["model"], report["completed"], report["failed"], report["output_tokens"]) == ("first", 4, 0, 16)
    assert report["time_between_tokens_s"]["p50"] == 0.0  # all tokens came in one chunk …
    assert report["time_between_chunks_s"] is None  # … which has no neighbour
    assert result.exit_code == 0
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 6  # the warm-up's two are others


async def test_failures_are_shown_and_make_the_exit_code_1() -> None:
    async with Server(fail=1).serving() as url:
        result = await kvyard_load(url, "--warm-up", "0")
    assert "3 of 4 requests completed" in result.stdout
    assert "1 × HTTP 429: queue full" in result.stdout
    for row in ("time to first token", "time between tokens", "time between chunks", "wait for a connection"):
        assert row in result.stdout
    assert result.exit_code == 1


async def test_more_tokens_than_the_model_takes_is_refused_before_anything_is_sent() -> None:
    server = Server()
    async with server.serving() as url:
        result = await kvyard_load(url, "--input-len", "97")
    assert result.exit_code == 1
    assert "97 tokens in and 4 out are 101, more than the model's 100" in result.stderr
    assert server.bodies == []


def test_no_verdict_is_said_in_the_table() -> None:
    text = printed(report_of(RUN, [sample()], [0.5]), as_json=False)
    assert "verdict: none: the client was the bottleneck" in text
