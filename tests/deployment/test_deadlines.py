"""Time runs out, queues fill, a worker stands still, an engine dies: what the client behind the router gets to see.

One seat (`--max-num-seqs=1`) on each engine, so that whoever comes second waits.
"""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest

from tests.deployment.clients import Answer, Departing, Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment, get_json, wait_for

LEASE_S = 4.5
FLAGS = (
    "--dtype=float32",
    "--transport=tcp",
    "--max-num-seqs=1",
    "--max-waiting-requests=2",  # whoever has no token yet waits
    "--fault=slow:1,slow_s:1.5",
    f"--lease={LEASE_S}",
    "--lease-renewal=1",
)
QUIET_S = 30.0
# The router's clock starts a little after the client's; the answer travels on a machine that may be busy.
EARLY_S, LATE_S = 0.05, 2.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with Deployment(*FLAGS) as running:
        yield running


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    shared.wait_healthy()
    yield shared
    shared.wait_healthy()
    shared.wait_quiet(QUIET_S)


def must_have_kept_its_deadline(answer: Answer, timeout: float) -> None:
    assert timeout - EARLY_S <= answer.seconds <= timeout + LATE_S, answer


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def stream_in_progress(deployment: Deployment, question: Question) -> Future[Answer]:
    begun = Event()
    streaming = in_background(deployment.url, question, begun.set)
    assert begun.wait(30.0)
    return streaming


def test_the_deadline_passes_in_the_queue(deployment: Deployment) -> None:
    streaming = stream_in_progress(
        deployment, Question(prompt_of("prose-5"), max_tokens=4000, stream=True, timeout=8.0)
    )
    queued = Question(prompt_of("prose-16"), timeout=4.0, stream=True, request_id="overdue-in-queue")
    client = in_background(deployment.url, queued)
    deployment.wait_state("overdue-in-queue", "decode-0", "queued")
    leaving = Departing(deployment.url, Question(prompt_of("prose-17"), request_id="leaves-the-queue"))
    deployment.wait_state("leaves-the-queue", "decode-0", "queued")
    leaving.leave()
    deployment.wait_state("leaves-the-queue", "decode-0", "response")

    client.result().must_be_an_error("deadline_exceeded", "")
    must_have_kept_its_deadline(client.result(), queued.timeout)
    # The one that held the seat has the same fate in the middle of its text: an error event, and no [DONE].
    cut = streaming.result()
    assert (cut.status, cut.done, cut.finish_reason) == (200, False, None)
    assert cut.error is not None
    assert cut.error["code"] == "deadline_exceeded"
    must_have_kept_its_deadline(cut, 8.0)
    reference = expected("prose-5", 64)
    assert cut.text[: len(reference)] == reference[: len(cut.text)]
    assert cut.text


def test_a_lease_is_kept_alive_for_as_long_as_its_reader_queues(deployment: Deployment) -> None:
    expired = deployment.metric("prefill-0", "kvyard_leases_expired_total")
    landed = deployment.metric("decode-0", "kvyard_kv_loads_total", outcome="landed")
    seat = Departing(deployment.url, Question(prompt_of("chat-1"), max_tokens=4000, stream=True, request_id="seat"))
    deployment.wait_state("seat", "decode-0", "decode")
    client = in_background(deployment.url, Question(prompt_of("chat-2"), request_id="patient"))
    deployment.wait_state("patient", "decode-0", "queued", age=LEASE_S + 1)
    seat.leave()
    client.result().must_be(expected("chat-2", 16))
    # Both were loaded; nothing had to be computed twice.
    assert deployment.metric("decode-0", "kvyard_kv_loads_total", outcome="landed") == landed + 2
    assert deployment.metric("prefill-0", "kvyard_leases_expired_total") == expired


def test_the_queue_is_full(deployment: Deployment) -> None:
    deployment.signal("prefill-0", signal.SIGSTOP, engine=False)
    try:
        waiting = [
            in_background(deployment.url, Question(prompt_of(name), request_id=f"full-{name}"))
            for name in ("prose-48", "random-7")
        ]
        for name in ("prose-48", "random-7"):
            wait_for(
                f"full-{name} is at prefill", lambda name=name: deployment.intervals(f"full-{name}", "prefill-0"), 9
            )
        refused = ask(deployment.url, Question(prompt_of("prose-16")))
    finally:
        deployment.signal("prefill-0", signal.SIGCONT, engine=False)
    assert (refused.status, refused.text) == (429, "")
    assert refused.error is not None
    assert (refused.error["code"], refused.error["type"]) == ("queue_full", "rate_limit_error")
    assert refused.retry_after is not None
    assert 1 <= int(refused.retry_after) <= 60
    waiting[0].result().must_be(expected("prose-48", 16))
    waiting[1].result().must_be(expected("random-7", 16))


def test_a_worker_stands_still_and_goes_on(deployment: Deployment) -> None:
    engine = deployment.engine("decode-0")
    question = Question(prompt_of("prose-100"), timeout=5.0, request_id="overdue-parked")
    client = in_background(deployment.url, question)
    deployment.wait_state("overdue-parked", "decode-0", "waiting_for_remote_kvs")
    deployment.signal("decode-0", signal.SIGSTOP, engine=False)
    try:
        # Its load cannot even fail; the engine's own clock ends the wait.
        client.result().must_be_an_error("deadline_exceeded", "")
        must_have_kept_its_deadline(client.result(), question.timeout)
        wait_for("decode-0 is unhealthy", lambda: not deployment.engine("decode-0")["healthy"], 15.0)
        assert "has not answered for" in deployment.engine("decode-0")["reason"]
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            get_json(f"{engine['url']}/health")
        assert unhealthy.value.code == 503
        assert deployment.engine("prefill-0")["healthy"]
        ask(deployment.url, Question(prompt_of("prose-5"))).must_be_an_error("engine_unavailable", "")
    finally:
        deployment.signal("decode-0", signal.SIGCONT, engine=False)
    deployment.wait_healthy()
    assert deployment.engine("decode-0")["epoch"] == engine["epoch"]
    assert get_json(f"{engine['url']}/health")["healthy"]
    ask(deployment.url, Question(prompt_of("prose-100"))).must_be(expected("prose-100", 16))


def test_the_router_is_killed(deployment: Deployment) -> None:
    before = {engine["engine_id"]: engine["epoch"] for engine in deployment.engines()}
    streaming = stream_in_progress(deployment, Question(prompt_of("prose-48"), max_tokens=4000, stream=True))
    (pid,) = [pid for pid in deployment.leftovers() if "router" in command_of(pid)]
    os.kill(pid, signal.SIGKILL)
    # Nobody is left to say a word to this one; its connection says it.
    assert streaming.result().broken is not None
    wait_for("the router is back", deployment.engines, 30.0)
    deployment.wait_healthy()
    assert {engine["engine_id"]: engine["epoch"] for engine in deployment.engines()} == before
    deployment.wait_quiet(QUIET_S)
    ask(deployment.url, Question(prompt_of("prose-48"))).must_be(expected("prose-48", 16))


def test_an_engine_is_killed_in_the_middle_of_a_stream(deployment: Deployment) -> None:
    before = deployment.engine("decode-0")
    streaming = stream_in_progress(deployment, Question(prompt_of("prose-129"), max_tokens=64, stream=True))
    deployment.signal("decode-0", signal.SIGKILL, worker=False)
    answer = streaming.result()
    assert answer.text
    answer.must_be_an_error("engine_unavailable", expected("prose-129", 64))
    deployment.wait_restarted(before)
    ask(deployment.url, Question(prompt_of("prose-129"), stream=True)).must_be(expected("prose-129", 16))
