"""/admin of an engine: what is asked of the AdmissionActor, and each of its answers as HTTP."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from actors.messages.admission import GrantReport
from actors.messages.control import (
    PauseReport,
    PauseScheduler,
    PrefixCacheReport,
    ResetPrefixCache,
    ResumeScheduler,
)
from actors.messages.model import ModelDescription
from actors.messages.stats import EngineStats
from tests.api.openai.scripted import serving

REACHED = PauseReport("all", reached=True, aborted=0, running=2, waiting=1)
DONE = PrefixCacheReport(done=True, blocks_held=0)


@pytest.mark.parametrize(
    ("path", "body", "asked", "report", "expected"),
    [
        (
            "pause",
            {"mode": "keep"},
            PauseScheduler("keep"),
            REACHED,
            {"paused": "all", "reached": True, "aborted": 0, "running": 2, "waiting": 1},
        ),
        (
            "resume",
            b"",
            ResumeScheduler(),
            PauseReport("none", reached=True, aborted=0, running=0, waiting=0),
            {"paused": "none", "reached": True, "aborted": 0, "running": 0, "waiting": 0},
        ),
        ("reset_prefix_cache", b"", ResetPrefixCache(False), DONE, {"done": True, "blocks_held": 0}),
        ("reset_prefix_cache", {}, ResetPrefixCache(False), DONE, {"done": True, "blocks_held": 0}),
        (
            "reset_prefix_cache",
            {"preempt_running": True, "timeout": 5},
            ResetPrefixCache(True),
            DONE,
            {"done": True, "blocks_held": 0},
        ),
    ],
)
async def test_an_order_and_its_answer(
    description: ModelDescription, path: str, body: Any, asked: Any, report: Any, expected: Any
) -> None:
    async with serving(description) as server:
        server.admission.reports = [report]
        assert await server.post(f"/admin/{path}", body) == (200, expected)
        assert server.admission.of(type(asked)) == [asked]


@pytest.mark.parametrize(
    ("path", "body", "code", "param", "words"),
    [
        ("pause", {}, "missing_required_parameter", "mode", "'abort' or 'wait' or 'keep'"),
        ("pause", b"", "missing_required_parameter", "mode", "'abort' or 'wait' or 'keep'"),
        ("pause", {"mode": "none"}, "invalid_value", "mode", "'abort' or 'wait' or 'keep', not 'none'"),
        ("pause", {"mode": 1}, "invalid_type", "mode", "'abort' or 'wait' or 'keep', not 1"),
        ("pause", {"mode": "keep", "modus": 1}, "unknown_parameter", "modus", "mode, timeout"),
        ("pause", {"mode": "keep", "timeout": 0}, "invalid_value", "timeout", "> 0"),
        ("pause", b"keep", "invalid_json", None, "not JSON"),
        ("resume", {"mode": "keep"}, "unknown_parameter", "mode", "the fields here are: timeout"),
        ("resume", [], "invalid_json", None, "JSON object"),
        ("reset_prefix_cache", {"preempt": True}, "unknown_parameter", "preempt", "preempt_running, timeout"),
        ("reset_prefix_cache", {"preempt_running": 1}, "invalid_type", "preempt_running", "got `int`"),
    ],
)
async def test_a_wrong_order_names_the_field_and_what_is_accepted(
    description: ModelDescription, path: str, body: Any, code: str, param: str | None, words: str
) -> None:
    async with serving(description) as server:
        status, answer = await server.post(f"/admin/{path}", body)
        error = answer["error"]
        assert (status, error["type"], error["code"], error["param"]) == (400, "invalid_request_error", code, param)
        assert words in error["message"]
        assert server.admission.messages == []


async def test_a_pause_that_another_replaced_is_a_conflict(description: ModelDescription) -> None:
    async with serving(description) as server:
        server.admission.reports = [PauseReport("none", reached=False, aborted=0, running=1, waiting=0)]
        status, answer = await server.post("/admin/pause", {"mode": "wait"})
        assert (status, answer["error"]["code"]) == (409, "pause_superseded")
        assert "paused is now 'none'" in answer["error"]["message"]


async def test_a_reset_that_cannot_be_says_who_holds_blocks(description: ModelDescription) -> None:
    grants = tuple(GrantReport(f"cmpl-{index}", 1, "held", index, 0.5, "decode") for index in range(1, 8))
    async with serving(description) as server:
        server.admission.reports = [PrefixCacheReport(done=False, blocks_held=28, grants=grants)]
        status, answer = await server.post("/admin/reset_prefix_cache", {})
        assert (status, answer["error"]["code"]) == (409, "kv_blocks_held")
        message = answer["error"]["message"]
        assert message.startswith("28 KV blocks are held, and nothing was forgotten: cmpl-1 has 1 (held: decode); ")
        assert message.endswith("cmpl-5 has 5 (held: decode); and 2 more. See /debug/blocks")


@pytest.mark.parametrize("by_header", [False, True])
async def test_a_pause_that_is_not_reached_in_time_stays_in_force_and_says_so(
    description: ModelDescription, by_header: bool
) -> None:
    async with serving(description) as server:
        server.engine.metrics.stats_changed(EngineStats(running=3, paused="new", steps_in_flight=2))
        body = {"mode": "wait"} if by_header else {"mode": "wait", "timeout": 0.05}
        headers = {"X-Request-Timeout": "0.05"} if by_header else {}
        with anyio.fail_after(5):
            status, answer = await server.post("/admin/pause", body, **headers)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert "the pause stays in force" in answer["error"]["message"]
        assert "2 steps are in flight and 3 requests run" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("reset_prefix_cache", {"preempt_running": True}, "1 step is in flight; the reset is made when none is left"),
        ("reset_prefix_cache", {}, "the engine has not answered"),
        ("resume", {}, "the engine has not answered"),
    ],
)
async def test_another_order_that_is_not_answered_in_time(
    description: ModelDescription, path: str, body: dict[str, Any], words: str
) -> None:
    async with serving(description) as server:
        server.engine.metrics.stats_changed(EngineStats(running=1, steps_in_flight=1))
        status, answer = await server.post(f"/admin/{path}", {**body, "timeout": 0.05})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert answer["error"]["message"] == f"not within 0.05 s: {words}"


async def test_orders_are_behind_the_key(description: ModelDescription) -> None:
    async with serving(description, api_key="right") as server:
        for path in ("pause", "resume", "reset_prefix_cache"):
            status, answer = await server.post(f"/admin/{path}", {"mode": "keep"}, Authorization="Bearer wrong")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.admission.messages == []
        status, answer = await server.get("/admin/pause", Authorization="Bearer right")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
