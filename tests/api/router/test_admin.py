"""/admin of the router: every engine is told, and every engine is in the answer."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from aiohttp import web

from tests.api.router.fakes import FakeEngine, cuts_the_line, deployment, fails, hangs


def three() -> list[FakeEngine]:
    return [FakeEngine("prefill-0"), FakeEngine("decode-0"), FakeEngine("decode-1")]


async def test_all_engines_are_told_at_once_what_the_client_said() -> None:
    engines = three()
    together = anyio.Event()

    async def waits_for_the_others(request: web.Request, body: dict[str, Any]) -> web.Response:
        if all(engine.orders for engine in engines):
            together.set()
        await together.wait()
        return web.json_response({"paused": "new"})

    for engine in engines:
        engine.obey = waits_for_the_others
    body = {"mode": "wait", "timeout": 20}
    async with deployment(*engines) as router, router.post("/admin/pause", json=body) as answer:
        assert answer.status == 200
        assert await answer.json() == {engine.engine_id: {"paused": "new"} for engine in engines}
        for engine in engines:
            ((path, headers, told),) = engine.orders
            assert (path, json.loads(told)) == ("/admin/pause", body)
            assert headers["Authorization"] == "Bearer secret"
            assert headers["X-Request-ID"] == answer.headers["X-Request-ID"]
            assert 15 < float(headers["X-Request-Timeout"]) <= 20


async def test_the_worst_status_is_the_answers_and_each_engine_is_in_it() -> None:
    prefill, decode, other = three()
    decode.obey = fails(409, "kv_blocks_held")
    async with deployment(prefill, decode, other) as router:
        async with router.post("/admin/reset_prefix_cache", json=None) as answer:
            body = await answer.json()
            assert (answer.status, body["prefill-0"], body["decode-1"]) == (409, {"done": True}, {"done": True})
            assert body["decode-0"]["error"]["code"] == "kv_blocks_held"
        other.obey = cuts_the_line
        async with router.post("/admin/reset_prefix_cache", json=None) as answer:
            body = await answer.json()
            assert (answer.status, body["decode-0"]["error"]["code"]) == (503, "kv_blocks_held")
            assert body["decode-1"]["error"]["code"] == "engine_unavailable"
            assert body["decode-1"]["error"]["message"].startswith("decode-1: ")


async def test_an_engine_that_no_probe_has_reached_is_named_by_its_url() -> None:
    engine = FakeEngine("decode-0")
    engine.probes_hang = True
    async with (
        deployment(engine, wait=False, probe_interval=20) as router,
        router.post("/admin/resume", json=None) as answer,
    ):
        assert (answer.status, await answer.json()) == (200, {engine.url: {"done": True}})


async def test_an_engine_that_a_probe_reaches_while_it_obeys_stands_once_in_the_answer() -> None:
    engine = FakeEngine("decode-0")
    engine.probes_hang = True

    async def is_probed_meanwhile(request: web.Request, body: dict[str, Any]) -> web.Response:
        engine.probes_hang = False
        await engine.known()
        return web.json_response({"done": True})

    engine.obey = is_probed_meanwhile
    async with deployment(engine, wait=False) as router, router.post("/admin/resume", json=None) as answer:
        assert (answer.status, await answer.json()) == (200, {"decode-0": {"done": True}})


async def test_two_engines_with_one_id_are_told_apart_by_their_urls() -> None:
    first, second, other = FakeEngine("decode-0"), FakeEngine("decode-0"), FakeEngine("decode-1")
    first.obey = fails(503, "engine_unavailable")
    async with deployment(first, second, other) as router, router.post("/admin/resume", json=None) as answer:
        body = await answer.json()
        assert (answer.status, set(body)) == (503, {first.url, second.url, "decode-1"})
        assert body[first.url]["error"]["code"] == "engine_unavailable"
        assert (body[second.url], body["decode-1"]) == ({"done": True}, {"done": True})


async def test_too_many_orders_is_the_engines_own_word() -> None:
    prefill, decode, other = three()
    other.obey = fails(429, "queue_full")
    async with deployment(prefill, decode, other) as router, router.post("/admin/resume", json=None) as answer:
        assert (answer.status, (await answer.json())["decode-1"]["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize("status", [401, 404])
async def test_a_refusal_between_router_and_engine_is_not_the_clients(status: int) -> None:
    prefill, decode, other = three()
    other.obey = fails(status, "theirs")
    async with deployment(prefill, decode, other) as router, router.post("/admin/resume", json=None) as answer:
        body = await answer.json()
        assert (answer.status, body["decode-1"]["error"]["code"]) == (502, "theirs")


async def test_an_engine_that_was_lost_meanwhile_is_named_and_not_waited_for() -> None:
    prefill, decode, other = three()
    other.obey = hangs
    async with deployment(prefill, decode, other) as router, anyio.create_task_group() as tasks:

        async def falls_silent() -> None:
            await other.arrived.wait()
            other.probes_hang = True

        tasks.start_soon(falls_silent)
        with anyio.fail_after(10):
            async with router.post("/admin/pause", json={"mode": "keep"}) as answer:
                body = await answer.json()
    assert (answer.status, body["prefill-0"], body["decode-0"]) == (503, {"done": True}, {"done": True})
    assert body["decode-1"]["error"]["message"].startswith("decode-1 is lost: no answer to a probe within")


async def test_a_wrong_order_reaches_no_engine() -> None:
    engines = three()
    async with deployment(*engines) as router:
        for path, body, param in (("pause", {"mode": "stop"}, "mode"), ("resume", {"x": 1}, "x")):
            async with router.post(f"/admin/{path}", json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
        async with router.post("/admin/resume", json=None, headers={"Authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401
    assert [engine.orders for engine in engines] == [[], [], []]


async def test_a_paused_engine_is_well_listed_as_paused_and_asked_last() -> None:
    prefill, decode, other = three()
    decode.report["paused"] = "all"
    async with deployment(prefill, decode, other) as router:
        async with router.get("/debug/engines") as answer:
            listed = [(e["engine_id"], e["healthy"], e["paused"]) for e in await answer.json()]
        assert listed == [("prefill-0", True, "none"), ("decode-0", True, "all"), ("decode-1", True, "none")]
        for _ in range(3):
            async with router.post() as answer:
                assert answer.status == 200
        assert (len(decode.requests), len(other.requests)) == (0, 3)
        other.report["paused"] = "new"
        await other.known()
        for _ in range(2):
            async with router.post() as answer:
                assert answer.status == 200
        assert (len(decode.requests), len(other.requests)) == (1, 4)
        async with router.get("/ready") as answer:
            assert answer.status == 200
