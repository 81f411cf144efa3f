"""What goes to the engines and what comes back, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from aiohttp import web

from tests.api.router.fakes import (
    DONE,
    Behaviour,
    FakeEngine,
    Router,
    answers,
    cuts_the_line,
    deployment,
    event,
    fails,
    hangs,
    stream_of,
)

WHOLE = event("a") + event("b") + DONE


def engines(prefill: int = 1, decode: int = 1) -> tuple[list[FakeEngine], list[FakeEngine]]:
    return [FakeEngine(f"prefill-{i}") for i in range(prefill)], [FakeEngine(f"decode-{i}") for i in range(decode)]


async def text_of(router: Router, **keywords: Any) -> bytes:
    async with router.post(**keywords) as answer:
        assert answer.status == 200, await answer.text()
        return bytes(await answer.read())


async def error_of(router: Router, **keywords: Any) -> tuple[int, dict[str, Any], Any]:
    async with router.post(**keywords) as answer:
        return answer.status, (await answer.json())["error"], answer.headers


async def test_the_body_goes_unchanged_to_both_and_the_ticket_to_decode() -> None:
    [prefill], [decode] = engines()
    body = {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}, "n": 1, "odd": [None, 1.5]}
    mine = {"X-Request-ID": "mine"}
    async with deployment(prefill, decode) as router, router.post(json=body, headers=mine) as answer:
        assert await answer.read() == WHOLE
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-Request-ID"] == "mine"
    assert prefill.bodies == [{**body, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}]
    assert decode.bodies == [{**body, "kv_transfer_params": {"ticket": "sealed"}}]
    for headers, _ in prefill.requests + decode.requests:
        assert headers["X-Request-ID"] == "mine"
        assert headers["Authorization"] == "Bearer secret"


async def test_each_hop_is_told_what_remains_of_the_shorter_deadline() -> None:
    [prefill], [decode] = engines()
    async with deployment(prefill, decode) as router:
        await text_of(router, json={"stream": True, "timeout": 40}, headers={"X-Request-Timeout": "50"})
    assert 18 < float(prefill.requests[0][0]["X-Request-Timeout"]) <= 20  # half of 40
    assert 38 < float(decode.requests[0][0]["X-Request-Timeout"]) <= 40


async def test_the_first_chunk_arrives_before_the_second_is_made() -> None:
    [prefill], [decode] = engines()
    read = anyio.Event()

    async def waits_for_the_reader(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(event("a"))
        await read.wait()
        await response.write(event("b") + DONE)
        return response

    decode.behave = waits_for_the_reader
    async with deployment(prefill, decode) as router, router.post() as answer:
        assert await answer.content.readany() == event("a")
        read.set()
        assert await answer.read() == event("b") + DONE


async def test_an_answer_that_is_no_stream() -> None:
    [prefill], [decode] = engines()
    async with deployment(prefill, decode) as router:
        assert json.loads(await text_of(router, json={"prompt": "x"})) == {"choices": [{"text": "ab"}]}


async def test_role_both_goes_alone_in_turn() -> None:
    both = [FakeEngine("both-0"), FakeEngine("both-1")]
    async with deployment(*both) as router:
        for _ in range(4):
            assert await text_of(router) == WHOLE
    assert [len(engine.requests) for engine in both] == [2, 2]
    assert "kv_transfer_params" not in both[0].bodies[0]


@pytest.mark.parametrize("broken", [fails(500), fails(503), fails(401), cuts_the_line])
async def test_a_prefill_engine_that_fails_is_replaced(broken: Any) -> None:
    prefill, [decode] = engines(2, 1)
    prefill[0].behave = broken
    async with deployment(*prefill, decode) as router:
        assert await text_of(router) == WHOLE
    assert [len(engine.requests) for engine in prefill] == [1, 1]
    assert decode.bodies[0]["kv_transfer_params"] == {"ticket": "sealed"}


async def test_without_a_prefill_engine_decode_recomputes() -> None:
    [prefill], [decode] = engines()
    prefill.behave = fails(503, "kv_send_failed")
    async with deployment(prefill, decode) as router:
        assert await text_of(router) == WHOLE
        assert "kv_transfer_params" not in decode.bodies[0]
        prefill.report["healthy"] = False
        await prefill.known()
        assert await text_of(router) == WHOLE
        assert len(prefill.requests) == 1
        async with router.get("/metrics") as answer:
            metrics = await answer.text()
    assert 'kvyard_router_retries_total{reason="error"} 1.0' in metrics
    assert 'kvyard_router_requests_total{outcome="completed"} 2.0' in metrics
    assert 'kvyard_router_engine_healthy{engine_id="prefill-0",role="prefill"} 0.0' in metrics


async def test_a_wrong_request_is_answered_by_the_prefill_engine_alone() -> None:
    [prefill], [decode] = engines()
    prefill.behave = fails(400, "context_length_exceeded")
    async with deployment(prefill, decode) as router:
        status, error, _ = await error_of(router)
    assert (status, error["message"], error["param"]) == (400, "fake 400", "p")
    assert decode.requests == []


async def test_full_engines() -> None:
    prefill, [decode] = engines(2, 1)
    for engine, seconds in zip(prefill, ("9", "4"), strict=True):
        engine.behave = fails(429, "queue_full", Retry_After=seconds)
    async with deployment(*prefill, decode) as router:
        status, error, headers = await error_of(router)
        assert (status, error["code"], headers["Retry-After"]) == (429, "queue_full", "4")
        prefill[1].behave = FakeEngine("prefill-1").behave
        assert await text_of(router) == WHOLE  # one is full, the other is not


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("broken", [fails(500), cuts_the_line])
async def test_a_decode_engine_that_fails_before_its_first_byte_is_replaced(broken: Any, stream: bool) -> None:
    [prefill], decode = engines(1, 3)
    decode[0].behave = decode[1].behave = broken
    async with deployment(prefill, *decode) as router:
        await text_of(router, json={"stream": stream})
    tickets = [engine.bodies[0].get("kv_transfer_params") for engine in decode]
    assert tickets == [{"ticket": "sealed"}, {"ticket": "sealed"}, None]
    assert len(prefill.requests) == 1


async def test_a_stream_that_ends_without_an_event_is_a_failure_before_the_first_byte() -> None:
    [prefill], decode = engines(1, 2)

    async def ends_at_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream_of(request)

    decode[0].behave = ends_at_once
    async with deployment(prefill, *decode) as router:
        assert await text_of(router) == WHOLE


async def test_no_engine_left_is_503_with_every_reason() -> None:
    [prefill], [decode] = engines()
    decode.behave = fails(500)
    async with deployment(prefill, decode) as router:
        status, error, headers = await error_of(router)
    assert (status, error["code"], headers["Retry-After"]) == (503, "engine_unavailable", "1")
    assert "decode-0: it answered 500" in error["message"]


async def test_an_engine_that_dies_inside_its_stream_ends_it_with_an_error_event() -> None:
    [prefill], [decode] = engines()

    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(event("a") + event("b")[:20])
        return await cuts_the_line(request, body)

    decode.behave = dies
    async with deployment(prefill, decode) as router:
        got = await text_of(router)
    assert got.startswith(event("a") + b'data: {"error":')
    assert got.endswith(b"\n\n")
    assert json.loads(got.split(b"\n\n")[1].removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    assert b"[DONE]" not in got
    assert event("b")[:20] not in got.split(b"\n\n", 1)[1]  # no half event before the error


async def test_a_silent_prefill_engine_costs_half_the_time_then_decode_goes_alone() -> None:
    [prefill], [decode] = engines()
    prefill.behave = hangs
    async with deployment(prefill, decode) as router:
        assert await text_of(router, json={"stream": True, "timeout": 0.6}) == WHOLE
    assert prefill.cancelled.is_set()
    assert 0.2 < float(decode.requests[0][0]["X-Request-Timeout"]) <= 0.3


async def test_a_prefill_engine_whose_probes_stay_silent_is_left_long_before_the_deadline() -> None:
    [prefill], [decode] = engines()
    prefill.behave = hangs
    async with deployment(prefill, decode) as router:
        prefill.probes_hang = True  # as under SIGSTOP
        assert await text_of(router) == WHOLE
        assert float(decode.requests[0][0]["X-Request-Timeout"]) > 590
        async with router.get("/debug/engines") as answer:
            assert (await answer.json())[0]["reason"] == "no answer to a probe within 0.1 s"


async def test_the_deadline_before_the_first_byte_is_504() -> None:
    [prefill], [decode] = engines()
    decode.behave = hangs
    async with deployment(prefill, decode) as router:
        status, error, _ = await error_of(router, headers={"X-Request-Timeout": "0.3"})
    assert (status, error["code"]) == (504, "deadline_exceeded")
    assert decode.cancelled.is_set()


@pytest.mark.parametrize("last", [DONE, b'data: {"error":{"message":"late","code":"deadline_exceeded"}}\n\n'])
@pytest.mark.parametrize("then", [hangs, cuts_the_line])
async def test_nothing_follows_the_last_event_of_an_engine(last: bytes, then: Behaviour) -> None:
    [prefill], [decode] = engines()

    async def speaks_to_the_end(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await (await stream_of(request)).write(event("a") + last)
        return await then(request, body)

    decode.behave = speaks_to_the_end
    async with deployment(prefill, decode) as router:
        assert await text_of(router, json={"stream": True, "timeout": 0.3}) == event("a") + last


async def test_a_stream_that_ends_without_a_last_event_is_no_whole_answer() -> None:
    [prefill], [decode] = engines()

    async def falls_silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream_of(request)
        await response.write(event("a"))
        await response.write_eof()
        return response

    decode.behave = falls_silent
    async with deployment(prefill, decode) as router:
        got = await text_of(router)
    assert got.startswith(event("a") + b'data: {"error":')


async def test_the_deadline_inside_a_stream_is_an_error_event() -> None:
    [prefill], [decode] = engines()

    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await (await stream_of(request)).write(event("a"))
        return await hangs(request, body)

    decode.behave = stalls
    async with deployment(prefill, decode) as router:
        got = await text_of(router, json={"stream": True, "timeout": 0.3})
    assert got.startswith(event("a") + b'data: {"error":')
    assert b'"code":"deadline_exceeded"' in got
    assert b"[DONE]" not in got


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_client_that_leaves_takes_its_upstream_request_along(stage: str, stream: bool) -> None:
    [prefill], [decode] = engines()
    waiting = prefill if stage == "prefill" else decode
    waiting.behave = hangs
    async with deployment(prefill, decode) as router:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: text_of(router, json={"stream": stream}))
            await waiting.arrived.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await waiting.cancelled.wait()
        async with router.get("/metrics") as answer:
            assert 'kvyard_router_requests_total{outcome="client_gone"} 1.0' in await answer.text()


async def test_a_client_that_leaves_inside_its_stream() -> None:
    [prefill], [decode] = engines()

    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await (await stream_of(request)).write(event("a"))
        return await hangs(request, body)

    decode.behave = stalls
    async with deployment(prefill, decode) as router:
        async with router.post() as answer:
            await answer.content.readany()
            answer.close()
        with anyio.fail_after(5):
            await decode.cancelled.wait()


async def test_an_engine_of_another_layout_is_not_paired_and_a_new_epoch_is_a_new_chance() -> None:
    [prefill], [decode] = engines()
    decode.report["incompatible_peers"] = {"prefill-0": "block_size: ours 16, theirs 32"}
    async with deployment(prefill, decode) as router:
        await text_of(router)
        assert len(prefill.requests) == 0
        prefill.report["epoch"] = 2
        await prefill.known()
        await text_of(router)
    assert len(prefill.requests) == 1


async def test_many_streams_at_once_share_no_byte() -> None:
    prefill, decode = engines(2, 2)

    async def echoes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream_of(request)
        for part in range(5):
            await response.write(event(f"{body['prompt']}/{part}"))
        await response.write(DONE)
        return response

    for engine in decode:
        engine.behave = echoes
    got: dict[int, bytes] = {}

    async with deployment(*prefill, *decode) as router, anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            got[number] = await text_of(router, json={"prompt": number, "stream": True})

        for number in range(60):
            tasks.start_soon(one, number)
    assert got == {n: b"".join(event(f"{n}/{part}") for part in range(5)) + DONE for n in range(60)}
    assert [len(engine.requests) for engine in prefill + decode] == [30, 30, 30, 30]


async def test_requests_under_way_are_finished_when_the_router_stops() -> None:
    [prefill], [decode] = engines()
    go_on = anyio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await go_on.wait()
        return await answers(request, body)

    decode.behave = slow
    got: list[bytes] = []
    async with deployment(prefill, decode) as router, anyio.create_task_group() as tasks:

        async def one() -> None:
            got.append(await text_of(router))

        tasks.start_soon(one)
        await decode.arrived.wait()
        async with router.get("/ready") as answer:
            assert answer.status == 200  # keeps a connection open
        await router.stop()
        with anyio.fail_after(5):
            while True:
                async with router.get("/ready") as answer:
                    if answer.status == 503:
                        break
        status, error, _ = await error_of(router)
        assert (status, error["message"]) == (503, "the router is shutting down")
        go_on.set()
    assert got == [WHOLE]


@pytest.mark.parametrize("begun", [True, False])
async def test_what_is_not_finished_within_the_drain_timeout_is_told(begun: bool) -> None:
    [prefill], [decode] = engines()

    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if begun:
            await (await stream_of(request)).write(event("a"))
        return await hangs(request, body)

    decode.behave = stalls
    got: list[tuple[int, bytes]] = []
    async with deployment(prefill, decode, drain_timeout=0.1) as router, anyio.create_task_group() as tasks:

        async def one() -> None:
            async with router.post() as answer:
                got.append((answer.status, await answer.read()))

        tasks.start_soon(one)
        await decode.arrived.wait()
        await router.stop()
    [(status, body)] = got
    if begun:
        assert status == 200
        assert body.startswith(event("a") + b'data: {"error":')
        assert b"the router is shutting down" in body
        assert b"[DONE]" not in body
    else:
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unavailable")
