"""Blocks that arrive damaged, and leases that end before anybody reads: the prompt is computed again, nothing is kept.

Each prompt is asked for twice: what a bad load left in the prefix cache would show in the second answer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.deployment.clients import Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment, wait_for
from tests.deployment.modes import DEPTH_3, PRIORITY, SMALL

LEASE_S = 3.0
MODES = {"tcp": (*PRIORITY, *SMALL), "nixl": (*DEPTH_3, *PRIORITY, *SMALL)}


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    flags = ("--dtype=float32", f"--lease={LEASE_S}", "--lease-renewal=0.8", "--fault=corrupt:1")
    with Deployment(*flags, f"--transport={request.param}", *MODES[request.param]) as running:
        yield running


def failures(deployment: Deployment, request_id: str) -> set[str]:
    """Why loads of the request failed, as its story at the decode engine says."""
    details = [part["detail"] for part in deployment.intervals(request_id, "decode-0")]
    return {text.split("load failed: ")[1].split(";")[0] for text in details if "load failed: " in text}


def outcomes(deployment: Deployment) -> dict[str, float]:
    found = ("landed", "recomputed", "failed")
    return {name: deployment.metric("decode-0", "kvyard_kv_loads_total", outcome=name) for name in found}


def test_one_wrong_bit_in_a_block(deployment: Deployment) -> None:
    before = outcomes(deployment)
    question = Question(prompt_of("prose-100"), stream=True, request_id="corrupt")
    ask(deployment.url, question).must_be(expected("prose-100", 16))
    assert outcomes(deployment) == {**before, "recomputed": before["recomputed"] + 1}
    assert failures(deployment, "corrupt") == {"checksum"}
    ask(deployment.url, Question(prompt_of("prose-100"), max_tokens=24)).must_be(expected("prose-100", 24))
    deployment.wait_quiet()


def test_a_lease_ends_before_its_blocks_are_read(deployment: Deployment) -> None:
    before, expired = outcomes(deployment), deployment.metric("prefill-0", "kvyard_leases_expired_total")
    decode, prefill = deployment.engine("decode-0"), deployment.engine("prefill-0")
    deployment.signal("decode-0", signal.SIGSTOP)
    try:
        question = Question(prompt_of("random-64"), request_id="expired")
        client = in_background(deployment.url, question)
        wait_for(
            "the lease of a reader that does not come has ended",
            lambda: deployment.metric("prefill-0", "kvyard_leases_expired_total") > expired,
            LEASE_S + 15,
            pause=0.02,
        )
    finally:
        deployment.signal("decode-0", signal.SIGCONT)
    client.result().must_be(expected("random-64", 16))
    assert outcomes(deployment) == {**before, "recomputed": before["recomputed"] + 1}
    assert failures(deployment, "expired") == {"expired"}
    # Nobody took the engines' standstill for their end.
    for engine in (decode, prefill):
        assert deployment.engine(engine["engine_id"])["epoch"] == engine["epoch"]
    ask(deployment.url, Question(prompt_of("random-64"), max_tokens=24)).must_be(expected("random-64", 24))
    deployment.wait_healthy()
    deployment.wait_quiet()
