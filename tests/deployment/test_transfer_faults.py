"""Prefill engines that die, stop or come back while their blocks are being read. Real processes, both transports.

Reads are slowed down, so that a fault meets them half way; each test waits until the load is seen to be under way.
Whatever happens, a client gets the text that transformers gives for its prompt; afterwards no block is left behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.deployment.clients import Departing, Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment, get_json, wait_for
from tests.deployment.modes import DEPTH_3, PRIORITY

READ_S = 2.0
LOAD_TIMEOUT_S = 6.0  # also a loaded machine reads in a third of it
LEASE_S = 8.0
PARKED = "waiting_for_remote_kvs"
FLAGS = (
    "--dtype=float32",
    f"--fault=slow:1,slow_s:{READ_S}",
    f"--kv-load-timeout={LOAD_TIMEOUT_S}",
    f"--lease={LEASE_S}",
    # Three missed heartbeats take longer than the load may: only its deadline notices a peer that stands still.
    "--lease-renewal=3",
)
QUIET_S = LEASE_S + 20
MODES = {"tcp": PRIORITY, "nixl": DEPTH_3}


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(transport: str) -> Iterator[Deployment]:
    with Deployment(*FLAGS, f"--transport={transport}", *MODES[transport]) as running:
        yield running


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    """Healthy before and after, and without a block that anybody keeps."""
    shared.wait_healthy()
    yield shared
    shared.wait_healthy()
    shared.wait_quiet(QUIET_S)


def loads(deployment: Deployment, outcome: str) -> float:
    return deployment.metric("decode-0", "kvyard_kv_loads_total", outcome=outcome)


@pytest.mark.parametrize(
    ("name", "fresh"),
    [("prose-300", "prose-129"), pytest.param("prose-1500", "prose-1024", marks=pytest.mark.soak)],
)
def test_prefill_is_killed_in_the_middle_of_a_transfer(deployment: Deployment, name: str, fresh: str) -> None:
    before = deployment.engine("prefill-0")
    recomputed = loads(deployment, "recomputed")
    reading = in_background(deployment.url, Question(prompt_of(name), stream=True, request_id="kill-reading"))
    deployment.wait_state("kill-reading", "decode-0", PARKED)
    waiting = in_background(deployment.url, Question(prompt_of("prose-256"), request_id="kill-waiting"))
    deployment.wait_state("kill-waiting", "prefill-0", "prefill")
    deployment.wait_state("kill-reading", "decode-0", PARKED, age=READ_S / 4)
    deployment.signal("prefill-0", signal.SIGKILL, worker=False)

    reading.result().must_be(expected(name, 16))
    waiting.result().must_be(expected("prose-256", 16))
    assert loads(deployment, "recomputed") == recomputed + 1
    story = deployment.intervals("kill-reading", "decode-0")
    assert [part["detail"] for part in story if part["detail"].startswith("load failed: peer_lost")], story
    deployment.wait_restarted(before)
    assert not set(before["worker_pids"]) & set(deployment.leftovers())

    # The new engine at the old address takes part again, and what the failed load left in the cache is right.
    landed = loads(deployment, "landed")
    ask(deployment.url, Question(prompt_of(fresh))).must_be(expected(fresh, 16))
    assert loads(deployment, "landed") == landed + 1
    ask(deployment.url, Question(prompt_of(name), max_tokens=24)).must_be(expected(name, 24))


def test_prefill_stands_still_so_that_only_the_deadline_notices(deployment: Deployment, transport: str) -> None:
    before = deployment.engine("prefill-0")
    recomputed = loads(deployment, "recomputed")
    reading = in_background(deployment.url, Question(prompt_of("random-333"), stream=True, request_id="stop-reading"))
    deployment.wait_state("stop-reading", "decode-0", PARKED, age=READ_S / 4)
    deployment.signal("prefill-0", signal.SIGSTOP)
    try:
        if transport == "tcp":
            # This one finds a prefill engine that takes its question and never answers.
            asked = in_background(deployment.url, Question(prompt_of("chat-1"), timeout=40.0))
        reading.result().must_be(expected("random-333", 16))
        assert loads(deployment, "recomputed") == recomputed + 1
        story = deployment.intervals("stop-reading", "decode-0")
        assert [part["detail"] for part in story if part["detail"].startswith("load failed: deadline")], story
        # Somebody else's standstill is not the decode engine's illness.
        assert get_json(f"{deployment.engine('decode-0')['url']}/health")["healthy"]
        if transport == "tcp":
            # Its reader does the copying, so it has nothing to fear after it has stopped.
            report = get_json(f"{deployment.engine('decode-0')['url']}/debug/blocks")
            assert report["quarantined"] == 0
            asked.result().must_be(expected("chat-1", 16))
    finally:
        deployment.signal("prefill-0", signal.SIGCONT)
    deployment.wait_healthy()
    after = deployment.engine("prefill-0")
    assert (after["pid"], after["epoch"]) == (before["pid"], before["epoch"])
    landed = loads(deployment, "landed")
    ask(deployment.url, Question(prompt_of("random-64"))).must_be(expected("random-64", 16))
    assert loads(deployment, "landed") == landed + 1


def test_a_client_leaves_while_its_blocks_are_being_read(deployment: Deployment) -> None:
    expired = deployment.metric("prefill-0", "kvyard_leases_expired_total")
    recomputed = loads(deployment, "recomputed")
    client = Departing(deployment.url, Question(prompt_of("prose-100"), max_tokens=64, request_id="leaving"))
    deployment.wait_state("leaving", "decode-0", PARKED)
    client.leave()
    deployment.wait_state("leaving", "decode-0", "response")
    deployment.wait_quiet(QUIET_S)
    # Its lease was given back; nobody had to wait for its end.
    assert deployment.metric("prefill-0", "kvyard_leases_expired_total") == expired
    assert loads(deployment, "recomputed") == recomputed
    ask(deployment.url, Question(prompt_of("prose-100"), max_tokens=8)).must_be(expected("prose-100", 8))


def test_both_workers_are_killed_while_clients_load_and_stream(deployment: Deployment) -> None:
    before = [deployment.engine(engine_id) for engine_id in ("prefill-0", "decode-0")]
    streaming = in_background(
        deployment.url, Question(prompt_of("prose-48"), max_tokens=64, stream=True, request_id="dying-stream")
    )
    deployment.wait_state("dying-stream", "decode-0", "decode")
    parked = in_background(deployment.url, Question(prompt_of("random-7"), request_id="dying-parked"))
    deployment.wait_state("dying-parked", "decode-0", PARKED)
    for engine in before:
        deployment.signal(engine["engine_id"], signal.SIGKILL, engine=False)
    # There is no other decode engine, and a stream that has begun cannot begin again elsewhere.
    streaming.result().must_be_right_or_an_error(expected("prose-48", 64))
    parked.result().must_be_an_error("engine_unavailable", "")
    for engine in before:
        after = deployment.wait_restarted(engine)
        assert after["worker_pids"] != engine["worker_pids"]
        assert f"[{engine['engine_id']}] kvyard up: it ended with exit code 70" in deployment.log()
    ask(deployment.url, Question(prompt_of("prose-48"))).must_be(expected("prose-48", 16))


def test_up_is_killed_in_the_middle_of_a_transfer(shared: Deployment) -> None:
    """The last test of its deployment."""
    shared.wait_healthy()
    client = in_background(shared.url, Question(prompt_of("prose-17"), stream=True, request_id="up-killed"))
    shared.wait_state("up-killed", "decode-0", PARKED)
    shared.process.kill()
    assert shared.process.wait(10.0) == -signal.SIGKILL
    wait_for("no process of the deployment is left", lambda: not shared.leftovers(), 10.0)
    assert client.result().broken is not None
