"""A deployment that an operator pauses, resumes and resets through the router, while clients stream."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.deployment.clients import Answer, Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment, wait_for

FLAGS = ("--dtype=float32", "--transport=tcp", "--drain-timeout=2")
ENGINES = {"prefill-0", "decode-0"}
WATCHED_S = 1.0  # a running stream has a token every few hundredths of a second
LONG = 48  # tokens


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with Deployment(*FLAGS) as running:
        yield running


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    yield shared
    assert order(shared, "resume")[0] == 200
    shared.wait_quiet()


def order(deployment: Deployment, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = b"" if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"{deployment.url}/admin/{path}", data, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_paused(deployment: Deployment, mode: str) -> bool:
    """The router knows it from its next probe on."""
    return bool(
        wait_for(
            f"paused is {mode}", lambda: all(e["paused"] == mode and e["healthy"] for e in deployment.engines()), 5
        )
    )


class Streaming:
    """A client in the middle of its text."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self.events = 0
        question = Question(prompt_of(name), max_tokens=LONG, stream=True, request_id=f"stream-{time.monotonic_ns()}")
        self.answer: Future[Answer] = in_background(deployment.url, question, self._heard)
        wait_for("the third event", lambda: self.events >= 3 or self.answer.done(), 30, pause=0.002)
        assert not self.answer.done(), self.answer.result()

    def _heard(self) -> None:
        self.events += 1


def test_keep_stops_a_stream_between_two_tokens(deployment: Deployment) -> None:
    streaming = Streaming(deployment, "prose-48")
    status, reports = order(deployment, "pause", {"mode": "keep"})
    assert status == 200
    assert set(reports) == ENGINES
    assert reports["decode-0"] == {"paused": "all", "reached": True, "aborted": 0, "running": 1, "waiting": 0}
    wait_paused(deployment, "all")  # by then what was on its way has arrived
    events = streaming.events
    assert events < LONG
    newcomer = in_background(deployment.url, Question(prompt_of("prose-16"), request_id="newcomer"))
    overdue = in_background(deployment.url, Question(prompt_of("prose-17"), timeout=1.0))
    deployment.wait_state("newcomer", "prefill-0", "queued", age=WATCHED_S)
    overdue.result().must_be_an_error("deadline_exceeded", "")
    assert streaming.events == events
    assert not newcomer.done()
    assert deployment.metric("decode-0", "kvyard_paused", mode="all") == 1

    status, held = order(deployment, "reset_prefix_cache")
    assert (status, held["prefill-0"]) == (409, {"done": True, "blocks_held": 0})
    assert held["decode-0"]["error"]["code"] == "kv_blocks_held"
    assert "(held: decode)" in held["decode-0"]["error"]["message"]
    preempted = deployment.metric("decode-0", "kvyard_preemptions_total")
    done = {"done": True, "blocks_held": 0}
    assert order(deployment, "reset_prefix_cache", {"preempt_running": True}) == (200, dict.fromkeys(ENGINES, done))
    assert deployment.metric("decode-0", "kvyard_preemptions_total") == preempted + 1
    assert streaming.events == events

    status, reports = order(deployment, "resume")
    assert (status, {report["paused"] for report in reports.values()}) == (200, {"none"})
    streaming.answer.result().must_be(expected("prose-48", LONG))
    newcomer.result().must_be(expected("prose-16", 16))


def test_a_forced_reset_in_the_middle_of_a_stream_changes_no_token(deployment: Deployment) -> None:
    streaming = Streaming(deployment, "prose-100")
    done = {"done": True, "blocks_held": 0}
    for _ in range(3):
        assert order(deployment, "reset_prefix_cache", {"preempt_running": True}) == (200, dict.fromkeys(ENGINES, done))
    streaming.answer.result().must_be(expected("prose-100", LONG))
    assert order(deployment, "reset_prefix_cache") == (200, dict.fromkeys(ENGINES, done))


def test_wait_lets_what_runs_end_and_nobody_else_begin(deployment: Deployment) -> None:
    streaming = Streaming(deployment, "prose-48")
    with ThreadPoolExecutor(1) as pool:
        pause = pool.submit(order, deployment, "pause", {"mode": "wait"})
        wait_paused(deployment, "new")
        newcomer = in_background(deployment.url, Question(prompt_of("prose-16"), request_id="after-wait"))
        deployment.wait_state("after-wait", "prefill-0", "queued")
        streaming.answer.result().must_be(expected("prose-48", LONG))
        status, reports = pause.result(30)
    assert (status, set(reports)) == (200, ENGINES)
    assert reports["decode-0"] == {"paused": "new", "reached": True, "aborted": 0, "running": 0, "waiting": 0}
    assert not newcomer.done()
    order(deployment, "resume")
    newcomer.result().must_be(expected("prose-16", 16))


def test_abort_ends_everybody_on_both_sides_with_an_error(deployment: Deployment) -> None:
    streaming = Streaming(deployment, "prose-48")
    assert order(deployment, "pause", {"mode": "keep"})[0] == 200
    queued = in_background(deployment.url, Question(prompt_of("prose-16"), request_id="to-be-aborted"))
    deployment.wait_state("to-be-aborted", "prefill-0", "queued")
    status, reports = order(deployment, "pause", {"mode": "abort"})
    assert status == 200
    ended = {"paused": "new", "reached": True, "aborted": 1, "running": 0, "waiting": 0}
    assert reports == {"prefill-0": ended, "decode-0": ended}
    assert streaming.answer.result().text
    streaming.answer.result().must_be_an_error("aborted", expected("prose-48", LONG))
    queued.result().must_be_an_error("aborted", "")
    assert order(deployment, "reset_prefix_cache")[0] == 200
    newcomer = in_background(deployment.url, Question(prompt_of("prose-17"), request_id="after-abort"))
    deployment.wait_state("after-abort", "prefill-0", "queued")
    order(deployment, "resume")
    newcomer.result().must_be(expected("prose-17", 16))
    ask(deployment.url, Question(prompt_of("prose-16"))).must_be(expected("prose-16", 16))


def test_a_paused_deployment_still_ends_on_sigterm(shared: Deployment) -> None:
    """The last of this file: it ends the deployment that they share."""
    streaming = Streaming(shared, "prose-48")
    assert order(shared, "pause", {"mode": "keep"})[0] == 200
    started = time.monotonic()
    assert shared.stop() == 0
    assert 1.5 < time.monotonic() - started < 15  # --drain-timeout is 2
    streaming.answer.result().must_be_an_error("engine_unavailable", expected("prose-48", LONG))
