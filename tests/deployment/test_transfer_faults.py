"""Prefill engines that die, stop or come back while their blocks are being read. Real processes, both transports.

Reads are slowed down, so that a fault meets them half way; each test waits until the load is seen to be under way.
Whatever happens, a client gets the text that transformers gives for its prompt; afterwards no block is left behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.deployment.clients import Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment

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


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(transport: str) -> Iterator[Deployment]:
    with Deployment(*FLAGS, f"--transport={transport}") as running:
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


def test_prefill_is_killed_in_the_middle_of_a_transfer(deployment: Deployment) -> None:
    before = deployment.engine("prefill-0")
    recomputed = loads(deployment, "recomputed")
    reading = in_background(deployment.url, Question(prompt_of("prose-511"), stream=True, request_id="kill-reading"))
    deployment.wait_state("kill-reading", "decode-0", PARKED, age=READ_S / 4)
    waiting = in_background(deployment.url, Question(prompt_of("prose-256"), request_id="kill-waiting"))
    deployment.wait_state("kill-waiting", "prefill-0", "prefill")
    deployment.signal("prefill-0", signal.SIGKILL, worker=False)

    reading.result().must_be(expected("prose-511", 16))
    waiting.result().must_be(expected("prose-256", 16))
    assert loads(deployment, "recomputed") == recomputed + 1
    story = deployment.intervals("kill-reading", "decode-0")
    assert [part["detail"] for part in story if part["detail"].startswith("load failed: peer_lost")], story
    deployment.wait_restarted(before)

    # The new engine at the old address takes part again, and what the failed load left in the cache is right.
    landed = loads(deployment, "landed")
    ask(deployment.url, Question(prompt_of("prose-300"))).must_be(expected("prose-300", 16))
    assert loads(deployment, "landed") == landed + 1
    ask(deployment.url, Question(prompt_of("prose-511"), max_tokens=24)).must_be(expected("prose-511", 24))
